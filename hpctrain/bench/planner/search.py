"""Search times of the planner, and the gap of its plan to the best of all plans of a small problem.

As a program, `python -m hpctrain.bench.planner.search CASE` searches for a plan. Then a node is lost and the program
replans as a run's agents do, once without compression and once with mode auto. It prints CPU seconds, which other
load on the machine does not change. Of plans for at most 64 GPUs it also prints what simulated annealing gains.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hpctrain import __version__
from hpctrain.base.errors import CommandTimeoutError
from hpctrain.base.module_argv import program
from hpctrain.base.package_data import package_data_path
from hpctrain.base.process import Runner
from hpctrain.bench.planner.annealing import annealed_pct
from hpctrain.bench.record import machine_and_versions
from hpctrain.planner import make_plan
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload, workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, make_tensor_parallel_groups
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.replan.replan import plan_without
from hpctrain.planner.search.exact import compositions
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.compression import AutoCompression, NoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology
from hpctrain.schedule.generate import why_no_schedule

MODELS = {
    "125M": {"layers": 12, "dim": 768, "heads": 12, "vocab": 32000},
    "350M": {"layers": 24, "dim": 1024, "heads": 16, "vocab": 32000},
    "1.3B": {"layers": 24, "dim": 2048, "heads": 16, "vocab": 32000},
    "7B": {"layers": 32, "dim": 4096, "heads": 32, "vocab": 32000},
}
PAPER = "paper-32-gpu.json"
"""Name of the topology file with the paper's GPUs."""
SIZES = (8, 32, 256, 1024, 10_000)
"""Numbers of equal GPUs for which a plan of the 7B model is searched; the times make up `search_time_s` of the
record."""
LOSSES = {"lost": NoCompression(), "lost_auto": AutoCompression(mode="auto")}
"""Key of the replan's figures in the record -> compression of the run that loses a node."""
Figures = dict[str, Any]
"""Figures of one case by their keys in the record, as `figures_of` returns them."""


class SearchCase(NamedTuple):
    """A search that the bench times: kind and number of the GPUs, and the model by its key in `MODELS`."""

    machines: str
    """Kind of the GPUs: equal; unlike (every second node has slower GPUs); or paper (those of the paper's cluster)."""
    gpus: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.machines}-{self.gpus}-{self.model}"


CASES = (
    *(SearchCase("equal", gpus, "7B") for gpus in SIZES),
    *(SearchCase("equal", 32, model) for model in ("350M", "1.3B")),
    *(SearchCase("unlike", 32, model) for model in ("350M", "1.3B")),
    *(SearchCase("unlike", gpus, "7B") for gpus in (16, 32, 256, 1024, 10_000)),
    *(SearchCase("paper", 32, model) for model in MODELS),
)
"""All cases. Those with GPUs of one kind and one model are in order of size, because larger ones are skipped once one
has failed."""


class MixedCase(NamedTuple):
    """A search that the bench times: GPUs of several kinds in nodes of unequal sizes."""

    gpus: int
    kinds: int
    """Number of kinds of GPUs (`KINDS`), which take turns over the nodes; 8 of 8 GPUs: each GPU is of a kind of its
    own."""
    gb_per_s: float
    """GB/s between nodes."""
    model: str
    """The model by its key in `MODELS`."""
    rows: int
    """Sequences of the global batch."""
    seq_len: int
    sizes: tuple[int, ...]
    """Numbers of GPUs of the first nodes; they repeat."""

    @property
    def machines(self) -> str:
        return f"mixed-{self.gpus}x{self.kinds}-{self.gb_per_s:g}GBs"

    @property
    def name(self) -> str:
        return f"{self.machines}-{self.model}-{self.rows}"


KINDS = (
    (3.1e14, 80e9, 2e12),
    (2.5e14, 40e9, 1.5e12),
    (1.25e14, 32e9, 9e11),
    (9e13, 24e9, 9e11),
    (6.5e13, 16e9, 3.2e11),
)
"""FLOP/s, bytes of memory and bytes/s of memory of the kinds of GPUs of mixed cases."""
MIXED_CASES = (
    MixedCase(256, 4, 12.5, "7B", 256, 2048, (8, 4, 8, 2)),
    MixedCase(1000, 4, 12.5, "7B", 1024, 2048, (8, 4, 8, 2)),
    MixedCase(64, 5, 12.5, "350M", 64, 1024, (8, 4, 2, 1, 8, 4)),
    MixedCase(64, 5, 12.5, "1.3B", 512, 2048, (8, 4, 2, 1, 8, 4)),
    MixedCase(64, 5, 12.5, "7B", 128, 2048, (8, 8, 4, 8, 2)),
    MixedCase(64, 5, 3, "1.3B", 64, 2048, (8, 4, 8, 2, 4, 1)),
    MixedCase(48, 4, 1.25, "350M", 48, 512, (2, 4, 8, 1, 4)),
    MixedCase(40, 5, 1, "125M", 32, 512, (1, 2, 4, 8)),
    MixedCase(40, 3, 1, "1.3B", 32, 1024, (4, 8, 2, 1)),
    MixedCase(32, 3, 3, "1.3B", 64, 2048, (4, 2, 4, 2)),
    MixedCase(8, 8, 3, "1.3B", 32, 1024, (2, 1, 2, 1, 2)),
    MixedCase(8, 8, 1, "350M", 16, 1024, (1,)),
)
"""Cases whose lower bounds lie far below the predicted steps."""
ALL_CASES: tuple[SearchCase | MixedCase, ...] = CASES + MIXED_CASES
ANNEALED_GPUS = 64
"""Most GPUs of a case whose plan is annealed."""


def scene_of_case(case: SearchCase | MixedCase) -> tuple[Run, Topology]:
    """Return the run and the topology for which the case searches a plan."""
    if isinstance(case, MixedCase):
        return _run(case.model, case.rows, "bf16", case.seq_len), mixed_gpus(case)
    if case.machines == "paper":
        topology = Topology.model_validate_json(package_data_path("topology", PAPER).read_text())
        return _run(case.model, 512, "fp16"), topology
    run = _run(case.model, 1024 if case.model == "7B" else 512, "bf16")
    return run, gpus_of(case.gpus, unlike=case.machines == "unlike")


def _run(model: str, rows: int, precision: str, seq_len: int = 2048) -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "precision": precision,
            "model": {"dims": MODELS[model]},
            "data": {"train": ["data"], "seq_len": seq_len},
            "batch": {"global": rows},
        }
    )


def gpus_of(count: int, unlike: bool = False) -> Topology:
    """Return a topology of `count` A100-like GPUs, eight a node. If `unlike`, the GPUs of every second node have 100
    TFLOP/s and 32 GB."""
    fast = Device(
        id="cuda0", type="type0", flops={"bf16": 2.5e14}, memory_bytes=80e9, memory_bytes_per_s=1.6e12, launch_s=6e-6
    )
    slow = fast.model_copy(update={"type": "type1", "flops": {"bf16": 1e14}, "memory_bytes": 32e9})
    nodes = [
        Node(
            id=f"node{number}", addr="", intra_bytes_per_s=2.3e11,
            devices=[
                (slow if unlike and number % 2 else fast).model_copy(update={"id": f"cuda{index}"})
                for index in range(8)
            ],
        )
        for number in range(count // 8)
    ]  # fmt: skip
    return uniform_topology(nodes, "cuda", alpha_s=1e-5, beta_s_per_byte=1e-11)


def mixed_gpus(case: MixedCase) -> Topology:
    """Return the topology of a mixed case."""
    nodes: list[Node] = []
    made = 0
    for number, size in enumerate(itertools.cycle(case.sizes)):
        devices = []
        for index in range(min(size, case.gpus - made)):
            kind = (made + index if case.kinds > len(KINDS) else number) % case.kinds
            if case.kinds > len(KINDS):
                slower = 1 + 0.17 * kind
                flops, memory_bytes, bytes_per_s = 2.5e14 / slower, 24e9 + 4e9 * (kind % 4), 1.6e12 / slower
            else:
                flops, memory_bytes, bytes_per_s = KINDS[kind]
            devices.append(
                Device(
                    id=f"cuda{index}", type=f"type{kind}", flops={"bf16": flops}, memory_bytes=memory_bytes,
                    memory_bytes_per_s=bytes_per_s, launch_s=6e-6,
                )
            )  # fmt: skip
        nodes.append(Node(id=f"node{number}", addr="", intra_bytes_per_s=2e10, devices=devices))
        made += len(devices)
        if made == case.gpus:
            return uniform_topology(nodes, "cuda", alpha_s=2e-5, beta_s_per_byte=1e-9 / case.gb_per_s)
    raise AssertionError("cycle() has no end")


def uniform_topology(nodes: list[Node], kind: str, alpha_s: float, beta_s_per_byte: float) -> Topology:
    """Return a topology of these nodes in which all links have the same alpha and beta.

    Args:
        kind: kind of all devices: cuda or cpu.
    """
    types = {device.type for node in nodes for device in node.devices}
    return Topology(
        provenance=Provenance(version=__version__, created="", transport="tcp", mode="published"),
        device_types={name: DeviceType(kind=kind, name=name) for name in types},
        nodes=nodes,
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, pairs=0)]),
    )


def measure(runner: Runner, search_limit_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Time the searches of `CASES` and `MIXED_CASES`, and compare the planner's plan for a small model on three devices
    with every plan there is; return the record of the bench.

    Args:
        search_limit_s: seconds after which one case is stopped.
    """
    progress("searches")
    figures, unfinished = search_figures(runner, search_limit_s)
    progress("every plan of a small problem")
    return machine_and_versions("plan", {"search_limit_s": search_limit_s}) | {
        "searches": figures,
        "search_unfinished": unfinished,
        "search_time_s": seconds_by_size(figures),
        "gap_pct": brute_force_gap_pct(),
    }


def search_figures(runner: Runner, limit_s: float) -> tuple[dict[str, Figures], dict[str, str]]:
    """Search a plan for each case in a process of its own. Return (case -> figures, case -> reason): the result of
    `figures_of` for cases that ended, and for the others the reason why they have no figures.

    Args:
        limit_s: seconds after which a case is stopped.
    """
    figures: dict[str, Figures] = {}
    unfinished: dict[str, str] = {}
    late: set[tuple[str, str]] = set()
    for case in ALL_CASES:
        if (case.machines, case.model) in late:
            unfinished[case.name] = "not tried after the smaller one"
            continue
        try:
            done = runner.run([*program("hpctrain.bench.planner.search"), case.name], timeout_s=limit_s)
        except CommandTimeoutError:
            unfinished[case.name] = f"took longer than {limit_s:g} s"
        else:
            if done.code:
                unfinished[case.name] = f"failed: {done.stderr.strip().rpartition(chr(10))[2]}"
            else:
                figures[case.name] = json.loads(done.stdout)
        if case.name in unfinished:
            late.add((case.machines, case.model))
    return figures, unfinished


def seconds_by_size(figures: dict[str, Figures]) -> dict[str, float]:
    """Return number of GPUs, as text -> search seconds of the 7B model on equal GPUs, for the cases that have
    figures."""
    equal = {case.name: str(case.gpus) for case in CASES if (case.machines, case.model) == ("equal", "7B")}
    return {equal[name]: figures_of_case["search_s"] for name, figures_of_case in figures.items() if name in equal}


def brute_force_gap_pct() -> float:
    """Return by how many percent the planner's plan is slower than the best of all plans without tensor parallelism,
    for a small model on three different devices. Both times are predictions."""
    run, topology = _small_run(), _unlike_devices()
    spec = run.spec()
    work, _ = workload_of(run, spec)
    cost = CostModel(work, make_device_pool(run, topology).links)
    best = min(predict(cost, layout).total for layout in _every_layout(run, topology, cost, work))
    made = make_plan(run, spec, topology)
    assert made.predicted is not None, "the planner predicts what it makes"
    return 100 * (made.predicted.step_time_s["total"] / best - 1)


def _every_layout(run: Run, topology: Topology, cost: CostModel, work: Workload) -> Iterator[Layout]:
    """Yield every layout without tensor parallelism that fits into memory: each order of devices, cut, micro-batch
    size, share of the batch and schedule."""
    units = make_tensor_parallel_groups(make_device_pool(run, topology), 1)
    for pp, dp in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)):
        for chosen in itertools.permutations(units, pp * dp):
            placement = Placement(tuple(chosen[replica * pp : (replica + 1) * pp]) for replica in range(dp))
            for schedule_spec, size in itertools.product(work.schedule_specs(pp), work.micro_batch_sizes()):
                stages = pp * schedule_spec.virtual_stages
                for counts in compositions(work.sequences // size, dp, 1):
                    if any(why_no_schedule(schedule_spec.name, pp, stages, count) for count in counts):
                        continue
                    for blocks in _cuts(work.spec.layers, stages):
                        layout = Layout(placement, schedule_spec.name, size, counts, blocks, work.memory_options)
                        if layout.memory_shortage(cost.memory) is None:
                            yield layout


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every division of `layers` blocks into stages, as the number of blocks of each stage. Only the first and
    the last stage may have no blocks."""
    for blocks in compositions(layers, stages, 0):
        if all(blocks[1:-1]):
            yield blocks


def _small_run() -> Run:
    dims = {"layers": 4, "dim": 256, "heads": 4, "vocab": 512}
    return Run.model_validate(
        {"steps": 1, "model": {"dims": dims}, "data": {"train": ["data"], "seq_len": 128}, "batch": {"global": 4}}
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
    return uniform_topology(nodes, "cpu", alpha_s=5e-5, beta_s_per_byte=1e-9)


def figures_of(run: Run, topology: Topology) -> Figures:
    """Return the figures of a search and of replans after the loss of the middle node.

    The figures of the search are its CPU seconds, the predicted step in seconds, its gap to the bound in percent and,
    for at most `ANNEALED_GPUS` devices, by how many percent simulated annealing shortens the step. Under each key of
    `LOSSES` are the figures of the replan for a run with the compression at this key: its CPU seconds, the blocks that
    are sent to another device, and the blocks that the devices of the new plan hold. For a cluster of one node there
    are no such keys.
    """
    figures: Figures = {}
    for name, compression in LOSSES.items():
        asked = run.model_copy(update={"compression": compression})
        spec = asked.spec()
        started = time.process_time()
        plan = make_plan(asked, spec, topology)
        if not figures:
            figures["search_s"] = time.process_time() - started
            figures |= _predicted(plan)
            if sum(len(node.devices) for node in topology.nodes) <= ANNEALED_GPUS:
                figures["annealed_pct"] = annealed_pct(asked, topology, plan)
        if len(topology.nodes) > 1:
            lost = topology.nodes[len(topology.nodes) // 2].id
            started = time.process_time()
            after, _ = plan_without(asked, spec, topology, (lost,), plan)
            figures[name] = {"replan_s": time.process_time() - started, **_state(after)}
    return figures


def _predicted(plan: Plan) -> dict[str, float]:
    assert plan.predicted is not None, "the planner predicts what it makes"
    assert plan.predicted.bound_s is not None, "and bounds it"
    total = plan.predicted.step_time_s["total"]
    return {"step_s": total, "gap_pct": 100 * (1 - plan.predicted.bound_s / total)}


def _state(plan: Plan) -> dict[str, int]:
    """Return the number of blocks that the moves of a new plan send ('sent_blocks') and the number that the plan's
    devices hold ('held_blocks'). A block counts once for each device that receives or holds it."""
    return {
        "sent_blocks": sum(upto - start for start, upto in (move.layers for move in plan.moves)),
        "held_blocks": plan.layers * plan.dp * plan.tp,
    }


def _main(name: str) -> None:
    print(json.dumps(figures_of(*scene_of_case(next(case for case in ALL_CASES if case.name == name)))))


if __name__ == "__main__":
    _main(sys.argv[1])
