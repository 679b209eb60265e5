"""A plan for all devices is hardly slower than the planner's plan for any part of them."""

from __future__ import annotations

import random

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.bench.planner.search import PAPER, uniform_topology
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, Node, Topology

KINDS = (("a", 2.5e14, 80e9), ("b", 1e14, 32e9), ("c", 6e14, 80e9), ("d", 5e13, 16e9))
"""(type, FLOP/s, bytes of memory)."""
REQUEST = PlanRequest(neighbours=False)
MOST = 1.02
"""Largest step time of the plan for all devices, as a multiple of that of a plan for a part. Searches try only likely
plans, so those of parts of parts may find a slightly faster one."""


def _cluster(seed: int, devices: int) -> Topology:
    """Nodes of 1 to 8 GPUs, of up to four kinds, with 1.25 to 50 GB/s between nodes."""
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


def _run(seed: int, divisor: int = 1) -> Run:
    draw = random.Random(seed)
    dims = {"layers": draw.choice((12, 22)) // divisor, "dim": 1024, "heads": 16, "vocab": 32000}
    return Run.model_validate(
        {
            "steps": 1,
            "precision": "bf16",
            "model": {"dims": dims},
            "data": {"train": ["data"], "seq_len": 1024},
            "batch": {"global": draw.choice((60, 64, 256, 500)) // divisor},
        }
    )


def _parts(topology: Topology) -> list[list[str]]:
    """The names of the nodes of each kind, of the faster half, and of the first and the second half."""
    by_kind: dict[str, list[str]] = {}
    for node in topology.nodes:
        by_kind.setdefault(node.devices[0].type, []).append(node.id)
    half, names = len(topology.nodes) // 2, [node.id for node in topology.nodes]
    fastest = sorted(topology.nodes, key=lambda node: -sum(device.flops["bf16"] for device in node.devices))
    kinds = [nodes for nodes in by_kind.values() if len(nodes) < len(names)]
    return [*kinds, [node.id for node in fastest[:half]], names[:half], names[half:]]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "devices", "divisor"), [(2, 100, 1), (4, 90, 1), (6, 128, 2)])
def test_no_part_of_a_cluster_has_a_faster_plan(seed, devices, divisor):
    topology, run = _cluster(seed, devices), _run(seed, divisor)
    spec = run.spec()
    whole = make_plan(run, spec, topology, REQUEST).predicted.step_time_s["total"]
    for names in _parts(topology):
        part = make_plan(run, spec, topology.only(names), REQUEST).predicted.step_time_s["total"]
        assert whole <= MOST * part, names


SMALL_RUNS = (
    ({"layers": 24, "dim": 1024, "heads": 16, "vocab": 320}, 64, 8),
    ({"layers": 12, "dim": 768, "heads": 12, "vocab": 32000}, 512, 64),
)
"""(dimensions of the model, sequence length, global batch); the first run is so small that few devices are faster than
many."""


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "seq_len", "rows"), SMALL_RUNS)
def test_few_devices_have_no_part_with_a_faster_plan(dims, seq_len, rows):
    """On at most 64 devices no search of parts follows, so the search itself has to consider few devices."""
    topology = Topology.model_validate_json(package_data_path("topology", PAPER).read_text())
    batch = {"batch": {"global": rows}, "data": {"train": ["data"], "seq_len": seq_len}}
    run = Run.model_validate({"steps": 1, "model": {"dims": dims}, **batch})
    names = [node.id for node in topology.nodes]
    parts = [[name for name in names if name not in (names[0], names[-1])], names[1:], names[:4], names[-4:]]
    whole, *others = (
        make_plan(run, run.spec(), topology.only(some), REQUEST).predicted.step_time_s["total"]
        for some in (names, *parts)
    )
    assert whole <= MOST * min(others)
