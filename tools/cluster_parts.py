"""Compares the planner's plans for random clusters with its plans for parts of them (docs/results/planner.md).

python -m tools.cluster_parts FIRST LAST    # seeds of clusters with 6 to 64 devices
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator

from hpctrain.base.errors import RefusedError
from hpctrain.bench.planner.search import uniform_topology
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, Node, Topology

KINDS = (("a", 2.5e14, 80e9), ("b", 1e14, 32e9), ("c", 6e14, 80e9), ("d", 5e13, 16e9))
"""(type, FLOP/s, bytes of memory)."""
DEVICES = (6, 8, 12, 16, 24, 32, 40, 48, 64)
MODELS = ((12, 768, 12), (24, 1024, 16), (24, 2048, 16))
"""(layers, width, heads)."""
REQUEST = PlanRequest(neighbours=False)


def random_cluster(seed: int, devices: int) -> Topology:
    """Return nodes of 1 to 8 GPUs, of up to four kinds, with 1.25 to 50 GB/s between nodes."""
    draw = random.Random(seed)
    kinds = draw.sample(KINDS, draw.randint(1, 4))
    nodes: list[Node] = []
    while (missing := devices - sum(len(node.devices) for node in nodes)) > 0:
        name, flops, memory = draw.choice(kinds)
        device = Device(
            id="cuda0", type=name, flops={"bf16": flops}, memory_bytes=memory, memory_bytes_per_s=1e12, launch_s=6e-6
        )
        size = min(missing, draw.choice((1, 2, 4, 8)))
        held = [device.model_copy(update={"id": f"cuda{index}"}) for index in range(size)]
        nodes.append(Node(id=f"node{len(nodes)}", addr="", intra_bytes_per_s=2e11, devices=held))
    return uniform_topology(nodes, "cuda", alpha_s=1e-5, beta_s_per_byte=draw.choice((8e-10, 1e-10, 2e-11)))


def random_scene(seed: int) -> tuple[Run, Topology]:
    """Return a run and a cluster of at most 64 devices."""
    draw = random.Random(f"run {seed}")
    layers, dim, heads = draw.choice(MODELS)
    run = Run.model_validate(
        {
            "steps": 1,
            "precision": "bf16",
            "model": {"dims": {"layers": layers, "dim": dim, "heads": heads, "vocab": 32000}},
            "data": {"train": ["data"], "seq_len": draw.choice((128, 512, 1024))},
            "batch": {"global": draw.choice((4, 8, 12, 16, 32, 64, 256))},
        }
    )
    return run, random_cluster(seed, draw.choice(DEVICES))


def halves_and_kinds(topology: Topology) -> list[list[str]]:
    """Return the names of the nodes of each kind, of the faster half, and of the first and the second half."""
    by_kind: dict[str, list[str]] = {}
    for node in topology.nodes:
        by_kind.setdefault(node.devices[0].type, []).append(node.id)
    half, names = len(topology.nodes) // 2, [node.id for node in topology.nodes]
    kinds = [nodes for nodes in by_kind.values() if len(nodes) < len(names)]
    return [*kinds, _fastest(topology)[:half], names[:half], names[half:]]


def single_nodes(topology: Topology) -> Iterator[list[str]]:
    """Yield the names of the nodes without the last one of each kind and size, of the fastest quarter, and of the
    fastest one and two nodes."""
    last = {(node.devices[0].type, len(node.devices)): node.id for node in topology.nodes}
    for name in last.values():
        yield [node.id for node in topology.nodes if node.id != name]
    fastest = _fastest(topology)
    for count in (len(fastest) // 4, 2, 1):
        yield fastest[:count]


def _fastest(topology: Topology) -> list[str]:
    def flops(node: Node) -> float:
        return sum(device.flops["bf16"] for device in node.devices)

    return [node.id for node in sorted(topology.nodes, key=flops, reverse=True)]


def step_s(run: Run, topology: Topology) -> float:
    """Return the predicted step of the planner's plan; infinite if the model fits nowhere."""
    try:
        plan = make_plan(run, run.spec(), topology, REQUEST)
    except RefusedError:
        return math.inf
    assert plan.predicted is not None, "the planner predicts its plans"
    return plan.predicted.step_time_s["total"]


def main(first: int, last: int) -> None:
    """Print a line for each cluster: its size, the step, the CPU seconds of the search, and by how many percent the
    plan of a part is faster, at most."""
    faster: list[float] = []
    for seed in range(first, last + 1):
        run, topology = random_scene(seed)
        began_s = time.process_time()
        whole_s = step_s(run, topology)
        search_s = time.process_time() - began_s
        if math.isinf(whole_s):
            continue
        parts = [*halves_and_kinds(topology), *single_nodes(topology)]
        smaller = {frozenset(names) for names in parts if 0 < len(names) < len(topology.nodes)}
        steps_s = [step_s(run, topology.only(sorted(names))) for names in smaller]
        faster.append(100 * (1 - min([whole_s, *steps_s]) / whole_s))
        print(
            f"seed {seed}: {len(topology.device_ids())} GPUs on {len(topology.nodes)} nodes, {whole_s:.4g} s a step, "
            f"search {search_s:.1f} s, parts up to {faster[-1]:.1f} % faster",
            flush=True,
        )
    slower = sum(share > 0.1 for share in faster)
    print(f"{slower} of {len(faster)} clusters have a faster part; mean {sum(faster) / len(faster):.2f} %")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
