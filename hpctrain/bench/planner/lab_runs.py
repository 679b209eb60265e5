"""`hpctrain bench plan --lab`: the planner's predictions compared with runs on the nodes of a lab with slow links.

The lab has two racks of four nodes. Each rack's uplink is as fast as one node's link, so the racks are oversubscribed
4:1. Messages take most of a step, and several workers share a node, or several nodes an uplink. A link is measured by
the probe, the devices by a probe of this machine with as many workers as the run has, but no more than cores: workers
that wait for messages leave the cores to others. The prediction knows the racks from the lab's spec.

As a program, `python -m hpctrain.bench.planner.lab_runs FOLDER RANK ADDRESS STEPS` is one worker of a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.base.module_argv import program
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.bench.comparison import errors_of
from hpctrain.bench.planner.search import uniform_topology
from hpctrain.bench.probe.lab_probe import probe_lab_nodes
from hpctrain.bench.ranks import leave_process_group
from hpctrain.bench.record import make_record
from hpctrain.bench.together import run_together
from hpctrain.lab.layout import NODE_INTERFACE, LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.spec import LabSpec, LabSwitch
from hpctrain.launch import small_run
from hpctrain.launch.probe import ProbeRequest, probe_local
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.run_log import read_metrics
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Node, NodeCluster, Topology
from hpctrain.worker.standalone import open_loop

RATE = "50mbit"
RACK = 4
"""Nodes of a rack; its uplink is as fast as one node's link."""
LAB = LabSpec(
    nodes=[{"name": f"node{number}"} for number in range(2 * RACK)],
    rate=RATE,
    switches=[LabSwitch(nodes=f"node[{at}-{at + RACK - 1}]", uplink_rate=RATE) for at in (0, RACK)],
)
MICRO_BATCH = 8
"""Sequences of a micro-batch."""
WARMUP_STEPS = 2
"""Steps at the beginning of a run that do not count."""


@dataclass(frozen=True)
class LabCase:
    """A plan on the lab: a pipeline of `dp` replicas with a stage of `spec` on each of `nodes`."""

    name: str
    nodes: tuple[int, ...]
    """Number of the node of each worker, by stage, then by replica. Nodes below `RACK` are in the first rack."""
    dp: int
    spec: DecoderSpec
    seq_len: int
    micro_batches: int
    """Micro-batches of a replica."""

    @property
    def pp(self) -> int:
        return len(self.nodes) // self.dp

    def plan(self) -> Plan:
        """Return the plan of the case."""
        devices = [f"node{node}:cpu{self.nodes[:at].count(node)}" for at, node in enumerate(self.nodes)]
        layers = self.spec.layers
        return small_run.make_plan(self.pp, self.dp, layers, MICRO_BATCH, self.micro_batches, devices=devices)


def _spec(layers: int, dim: int) -> DecoderSpec:
    return DecoderSpec(layers=layers, dim=dim, heads=4, vocab=small_run.BYTES_VOCABULARY)


_TWO, _THREE, _WIDE = _spec(2, 128), _spec(3, 128), _spec(4, 256)
CASES = (
    LabCase("1 worker a node", (0, 1), 1, _TWO, 128, 4),
    LabCase("2 workers a node", (0, 0, 1, 1), 2, _TWO, 128, 4),
    LabCase("3 workers a node", (0, 0, 0, 1, 1, 1), 3, _TWO, 128, 4),
    LabCase("2 workers a node, 3 stages", (0, 0, 1, 1, 2, 2), 2, _THREE, 128, 4),
    LabCase("2 of 4 nodes over an uplink", (0, 1, 4, 5), 2, _TWO, 128, 4),
    LabCase("4 of 4 nodes over an uplink", (0, 1, 2, 3, 4, 5, 6, 7), 4, _TWO, 128, 4),
    LabCase("2 all-reduces over an uplink", (0, 4, 1, 5), 2, _WIDE, 32, 2),
)


@dataclass(frozen=True)
class LabRow:
    """Measured and predicted step of one case, and the prediction if nothing were shared."""

    case: str
    workers: int
    step_time_s: float
    """Median of the measured steps, seconds."""
    predicted_s: float
    unshared_s: float
    """Predicted seconds if each worker had a network card of its own, and no uplink were oversubscribed."""
    error_pct: float
    """Error of `predicted_s`; above 0, the prediction is too slow."""
    unshared_error_pct: float


def measure(machine: Machine, layout: LabLayout, steps: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train each of `CASES` for `steps` steps on the lab of the spec `LAB`, and return the record of the bench.

    Raises:
        HpctrainError: a probe or a worker failed.
    """
    with small_run.temporary_corpus() as folder:
        progress("a link of the lab")
        link = probe_lab_nodes(machine, layout, layout.names[:2])[0].fabric.links[0].ab.cost()
        assert link is not None, "the probe of two nodes measures their link"
        rows: list[LabRow] = []
        by_workers: dict[int, Topology] = {}
        for number, case in enumerate(CASES):
            # Two workers at least, because the probe also measures the link between two of one node.
            workers = min(len(case.nodes), max(2, usable_cpus()))
            if workers not in by_workers:
                progress(f"the devices of {workers} workers")
                place = folder / f"probe{workers}"
                place.mkdir()
                by_workers[workers] = probe_local(
                    workers, place, machine.runner, machine.clock, ProbeRequest(device="cpu")
                )
            progress(case.name)
            step_s = _train(machine, layout, folder / str(number), folder / "corpus", case, steps)
            rows.append(compare(case, step_s, by_workers[workers], link))
    return lab_record(rows, steps)


def lab_record(rows: Sequence[LabRow], steps: int) -> dict[str, Any]:
    """Return the record of the bench.

    Args:
        steps: measured steps of each run.
    """
    settings = {"steps": steps, "rate": RATE, "cases": [_as_json(case) for case in CASES]}
    shared, alone = ([getattr(row, name) for row in rows] for name in ("predicted_s", "unshared_s"))
    measured = [row.step_time_s for row in rows]
    return make_record("plan --lab", rows, settings) | {
        "error_pct": asdict(errors_of(shared, measured)),
        "unshared_error_pct": asdict(errors_of(alone, measured)),
    }


def _as_json(case: LabCase) -> dict[str, Any]:
    return asdict(case) | {"spec": case.spec.model_dump(exclude_none=True)}


def compare(case: LabCase, step_time_s: float, local: Topology, link: tuple[float, float]) -> LabRow:
    """Return the row of a case: its measured step beside the predicted one.

    Args:
        step_time_s: the measured step, in seconds.
        local: topology of virtual nodes of this machine, at least two, whose devices are as fast as in the case.
        link: (alpha in s, beta in s/byte) between two nodes of the lab, of a message alone.
    """
    shared, alone = (_predicted_s(case, topology_of_lab(case, local, link, shares)) for shares in (True, False))
    errors = [100 * (seconds / step_time_s - 1) for seconds in (shared, alone)]
    return LabRow(case.name, len(case.nodes), step_time_s, shared, alone, *errors)


def topology_of_lab(case: LabCase, local: Topology, link: tuple[float, float], shared: bool) -> Topology:
    """Return the topology of the lab with as many devices a node as the case has workers there.

    The other arguments are those of `compare`.

    Args:
        shared: False: as if each worker had a network card of its own, and no uplink were oversubscribed.
    """
    device, within = local.nodes[0].devices[0], local.fabric.links[0].ab.cost()
    assert within is not None, "the probe of several workers measures their links"
    most = max(map(case.nodes.count, case.nodes))
    devices = [
        device.model_copy(update={"id": f"cpu{index}", "nic": None if shared else f"eth{index}"})
        for index in range(most)
    ]
    nodes = [Node(id=node.name, addr="", intra_bytes_per_s=1 / within[1], devices=devices) for node in LAB.nodes]
    racks = [
        NodeCluster(id=f"rack{number}", members=switch.nodes, source="prior", oversubscription=float(RACK))
        for number, switch in enumerate(LAB.switches)
    ]
    topology = uniform_topology(nodes, "cpu", *link)
    fabric = topology.fabric.model_copy(update={"clusters": racks if shared else []})
    return topology.model_copy(update={"fabric": fabric})


def _predicted_s(case: LabCase, topology: Topology) -> float:
    plan = case.plan()
    run = small_run.plain_run(Path("corpus"), case.spec, plan.sequences, case.seq_len)
    scene = layout_of_plan(run, case.spec, plan, topology)
    return predict(scene.cost, scene.layout, whole=True).total


def _train(machine: Machine, layout: LabLayout, folder: Path, corpus: Path, case: LabCase, steps: int) -> float:
    """Return the median seconds of a step of the case, whose workers run in the namespaces of their nodes."""
    plan = case.plan()
    small_run.make_run(folder, corpus, case.spec, plan.sequences, case.seq_len)
    plan.write(folder / "plan.json")
    names = [layout.names[node] for node in case.nodes]
    commands = [
        ["ip", "netns", "exec", layout.namespace(name), *program("hpctrain.bench.planner.lab_runs"), str(folder),
         str(rank), layout.address(names[0]), str(WARMUP_STEPS + steps)]
        for rank, name in enumerate(names)
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": NODE_INTERFACE}
    run_together(machine.runner, "bench plan --lab", commands, folder, environment)
    return median(row.step_time_s for row in read_metrics(folder / "metrics.jsonl")[WARMUP_STEPS:])


def main(folder: Path, rank: int, address: str, steps: int) -> None:
    """Train as one worker of the plan in `folder`.

    Args:
        address: address of the first worker's node.
        steps: steps to train.
    """
    plan = Plan.read(folder / "plan.json")
    _, loop = open_loop(rank, plan.world_size, folder, plan, address)
    for _ in range(steps):
        loop.one_step()
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
