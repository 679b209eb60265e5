"""How long the planner searches, and how far its plan is from the best of all plans of a small problem.

As a program, `python -m hpctrain.bench.plan_search GPUS` searches once and prints its seconds of processor time, so
that others on the machine do not count.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from hpctrain import __version__
from hpctrain.base.errors import CommandTimeout
from hpctrain.base.process import Runner
from hpctrain.planner import make_plan
from hpctrain.planner.cost import CostModel
from hpctrain.planner.exact import compositions
from hpctrain.planner.fleet import find_fleet
from hpctrain.planner.layout import Layout
from hpctrain.planner.predict import predict
from hpctrain.planner.unit import Cells, make_units
from hpctrain.planner.workload import Workload, workload_of
from hpctrain.records.link import LinkClass
from hpctrain.records.run import Run
from hpctrain.records.topology import Device, DeviceType, Fabric, Node, Provenance, Topology
from hpctrain.schedule.generate import why_no_table

SIZES = (8, 32, 256, 1024, 10_000)
"""GPUs of the timed searches."""


def search_seconds(runner: Runner, limit_s: float) -> tuple[dict[str, float], dict[str, str]]:
    """Processor seconds of a search by number of GPUs, and why the other numbers have none."""
    found: dict[str, float] = {}
    unfinished: dict[str, str] = {}
    for gpus in map(str, SIZES):
        if unfinished:
            unfinished[gpus] = "not tried after the smaller one"
            continue
        try:
            done = runner.run([sys.executable, "-m", "hpctrain.bench.plan_search", gpus], timeout_s=limit_s)
        except CommandTimeout:
            unfinished[gpus] = f"took longer than {limit_s:g} s"
            continue
        if done.code:
            unfinished[gpus] = f"failed: {done.stderr.strip().rpartition(chr(10))[2]}"
        else:
            found[gpus] = float(done.stdout)
    return found, unfinished


def brute_force_gap_pct() -> float:
    """How much slower the planner's plan is than the best of every plan on three unlike devices."""
    run, topology = _small_run(), _unlike_devices()
    spec = run.spec()
    work, _ = workload_of(run, spec)
    cost = CostModel(work, find_fleet(run, topology).links)
    best = min(predict(cost, layout).total for layout in _every_layout(run, topology, cost, work))
    made = make_plan(run, spec, topology)
    assert made.predicted is not None, "the planner predicts what it makes"
    return 100 * (made.predicted.step_time_s["total"] / best - 1)


def _every_layout(run: Run, topology: Topology, cost: CostModel, work: Workload) -> Iterator[Layout]:
    """Every order of devices, cut, micro-batch, share of the batch and schedule with tp 1 that fits."""
    units = make_units(find_fleet(run, topology), 1)
    for pp, dp in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)):
        for chosen in itertools.permutations(units, pp * dp):
            cells = Cells(tuple(chosen[replica * pp : (replica + 1) * pp]) for replica in range(dp))
            for order, size in itertools.product(work.orders(pp), work.micro_batch_sizes()):
                stages = pp * order.chunks
                for counts in compositions(work.rows // size, dp, 1):
                    if any(why_no_table(order.schedule, pp, stages, count) for count in counts):
                        continue
                    for blocks in _cuts(work.spec.layers, stages):
                        layout = Layout(cells, order.schedule, size, counts, blocks, work.saving)
                        if layout.excess(cost.memory) is None:
                            yield layout


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Blocks by stage; only the first and the last may be without."""
    for blocks in compositions(layers, stages, 0):
        if all(blocks[1:-1]):
            yield blocks


def _small_run() -> Run:
    dims = {"layers": 4, "dim": 256, "heads": 4, "vocab": 512}
    return Run.model_validate(
        {"steps": 1, "model": {"dims": dims}, "data": {"train": ["data"], "seq_len": 128}, "batch": {"global": 4}}
    )


def _large_run() -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "precision": "bf16",
            "model": {"dims": {"layers": 32, "dim": 4096, "heads": 32, "vocab": 32000}},
            "data": {"train": ["data"], "seq_len": 2048},
            "batch": {"global": 1024},
        }
    )


def _unlike_devices() -> Topology:
    nodes = [
        Node(
            id=f"node{number}", addr="",
            devices=[
                Device(
                    id="cpu0", type=f"type{number}", flops={"fp32": 1e11 * speed}, memory_bytes=16e9,
                    memory_bytes_per_s=1e10 * speed, launch_s=1e-6,
                )
            ],
        )
        for number, speed in enumerate((1.0, 0.7, 0.4))
    ]  # fmt: skip
    return _topology(nodes, "cpu", alpha_s=5e-5, bytes_per_s=1e9)


def _equal_gpus(count: int) -> Topology:
    """Nodes of eight equal GPUs: A100-like figures."""
    gpu = Device(
        id="cuda0", type="type0", flops={"bf16": 2.5e14}, memory_bytes=80e9, memory_bytes_per_s=1.6e12, launch_s=6e-6
    )
    nodes = [
        Node(
            id=f"node{number}", addr="", intra_bytes_per_s=2.3e11,
            devices=[gpu.model_copy(update={"id": f"cuda{index}"}) for index in range(8)],
        )
        for number in range(count // 8)
    ]  # fmt: skip
    return _topology(nodes, "cuda", alpha_s=1e-5, bytes_per_s=1e11)


def _topology(nodes: list[Node], kind: str, alpha_s: float, bytes_per_s: float) -> Topology:
    types = {device.type for node in nodes for device in node.devices}
    return Topology(
        provenance=Provenance(version=__version__, created="", transport="tcp", mode="published"),
        device_types={name: DeviceType(kind=kind, name=name) for name in types},
        nodes=nodes,
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=alpha_s, beta_s_per_byte=1 / bytes_per_s, pairs=0)]),
    )


def _main(gpus: int) -> None:
    run, topology = _large_run(), _equal_gpus(gpus)
    started = time.process_time()
    make_plan(run, run.spec(), topology)
    print(time.process_time() - started)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
