"""`hpctrain bench plan --own`: the planner's predictions compared with runs of hpctrain's workers on this machine.

The machine is probed, then a few small plans of two or four workers each are trained by the code that workers run. A
profile is fitted to some of the runs. The other runs are predicted without the profile and with it. The record lists
the fitted runs too, but its mean errors leave them out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.base.clock import Clock
from hpctrain.base.process import Runner
from hpctrain.bench.comparison import errors_of
from hpctrain.bench.ranks import leave_process_group, run_ranks
from hpctrain.bench.record import machine_and_versions
from hpctrain.launch import small_run
from hpctrain.launch.probe import ProbeRequest, probe_local
from hpctrain.parallel.early_sums import TRIED_STEPS, when_sums_begin
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import WARMUP_STEPS, fit_profile, merge_profiles
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.run_log import MetricRow, read_metrics
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.worker.standalone import open_loop

SMALL = DecoderSpec(layers=4, dim=256, heads=4, vocab=small_run.BYTES_VOCABULARY)
LARGE = DecoderSpec(layers=4, dim=384, heads=6, vocab=small_run.BYTES_VOCABULARY)


@dataclass(frozen=True)
class OwnRunSettings:
    """Settings of `hpctrain bench plan --own`: steps of each run, sequences in a step (`rows`), and models. The profile
    is fitted to runs of the first model."""

    steps: int = 30
    rows: int = 8
    """Sequences in a step; a multiple of 8."""
    seq_len: int = 128
    specs: tuple[DecoderSpec, ...] = (SMALL, LARGE)
    """Models that are trained; the profile is fitted to runs of the first one."""


@dataclass(frozen=True)
class Trained:
    """The measurements of one plan that was trained. `case` is its key in `PLANS`."""

    case: str
    spec: DecoderSpec
    run: Run
    plan: Plan
    topology: Topology
    """The probed nodes that the plan was trained on."""
    rows: list[MetricRow]
    load_1min: float
    """Load average of the machine when the run began."""

    @property
    def step_time_s(self) -> float:
        return median(row.step_time_s for row in self.rows[WARMUP_STEPS + tried_steps(self.plan) :])

    @property
    def peak_bytes(self) -> float:
        return max(row.memory_bytes_max or 0.0 for row in self.rows)


def tried_steps(plan: Plan) -> int:
    """Return the number of first steps in which workers of the plan try early and late sums of gradients, which later
    steps no longer do; 0 if the plan has no such trial."""
    return TRIED_STEPS if when_sums_begin(plan, "cpu") == "faster" else 0


@dataclass(frozen=True)
class OwnCase:
    """A plan that is trained, and the virtual nodes that it runs on. `plan` makes the plan from (blocks of the model,
    sequences in the batch)."""

    plan: Callable[[int, int], Plan]
    nodes: int = 2
    devices_per_node: int = 1

    @property
    def world(self) -> int:
        """Number of workers, one for each device."""
        return self.nodes * self.devices_per_node


IN_A_NODE = ("local0:cpu0", "local0:cpu1")
CROSSED = ("local0:cpu0", "local1:cpu0", "local1:cpu1", "local0:cpu1")
"""Devices of two pipelines of two ranks, such that stage messages and sums leave the nodes."""
PLANS = {
    "dp2": OwnCase(lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 2, 1)),
    "pp2": OwnCase(lambda layers, rows: small_run.make_plan(2, 1, layers, rows, 1)),
    "tp2": OwnCase(lambda layers, rows: small_run.make_plan(1, 1, layers, rows, 1, tp=2)),
    "pp2, 4 micro-batches": OwnCase(lambda layers, rows: small_run.make_plan(2, 1, layers, rows // 4, 4)),
    "dp2, 2 chunks": OwnCase(lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 4, 2, chunks=2)),
    "dp2, zero 1": OwnCase(lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 2, 1, zero=1)),
    "dp2, zero 2": OwnCase(lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 4, 2, zero=2)),
    "dp2, zero 3": OwnCase(lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 4, 2, zero=3)),
    "dp2 in a node": OwnCase(
        lambda layers, rows: small_run.make_plan(1, 2, layers, rows // 2, 1, devices=IN_A_NODE), 1, 2
    ),
    "pp2 × dp2, 2 chunks": OwnCase(
        lambda layers, rows: small_run.make_plan(2, 2, layers, rows // 8, 4, chunks=2, devices=CROSSED), 2, 2
    ),
}
"""Case -> its plan and nodes. The case with two pipelines has four workers; each has half as many of the machine's
cores as a worker of the other cases."""
FITTED = ("dp2", "pp2", "tp2")
"""Cases whose runs of the first model the profile is fitted to."""


def measure(runner: Runner, clock: Clock, settings: OwnRunSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Probe this machine, train each model of `settings.specs` by each of `PLANS`, and return the record of `compare`.

    Raises:
        HpctrainError: the probe or a process of the bench failed.
    """
    with small_run.temporary_corpus() as folder:
        topologies: dict[tuple[int, int], Topology] = {}
        for case in PLANS.values():
            key = case.nodes, case.devices_per_node
            if key not in topologies:
                progress(f"a probe of {case.world} workers on {case.nodes} nodes")
                place = folder / f"probe-{len(topologies)}"
                place.mkdir()
                request = ProbeRequest(device="cpu", cpu_devices=case.devices_per_node)
                topologies[key] = probe_local(case.nodes, place, runner, clock, request)
        trained: list[Trained] = []
        for spec in settings.specs:
            for name, case in PLANS.items():
                progress(f"{name}, {_name(spec)}")
                topology = topologies[case.nodes, case.devices_per_node]
                trained.append(
                    _train(folder / f"run-{len(trained)}", folder / "corpus", name, spec, topology, settings)
                )
    return compare(trained, settings)


def _train(
    folder: Path, corpus: Path, case: str, spec: DecoderSpec, topology: Topology, settings: OwnRunSettings
) -> Trained:
    load, plan = os.getloadavg()[0], PLANS[case].plan(spec.layers, settings.rows)
    # No agent holds memory for these workers, so the prediction is not to count it.
    alone = Recovery(memory="off")
    run = small_run.make_run(folder, corpus, spec, settings.rows, settings.seq_len, recovery=alone)
    run_ranks(_steps, plan.world_size, folder, plan, settings.steps + tried_steps(plan))
    return Trained(case, spec, run, plan, topology, read_metrics(folder / "metrics.jsonl"), round(load, 2))


def _steps(rank: int, world: int, folder: Path, plan: Plan, steps: int) -> None:
    _, loop = open_loop(rank, world, folder, plan)
    for _ in range(steps):
        loop.one_step()
    leave_process_group()


def compare(trained: Sequence[Trained], settings: OwnRunSettings) -> dict[str, Any]:
    """Fit a profile to the runs of the first model with the plans in `FITTED`, predict all runs without and with this
    profile, and return the record of the bench.

    Args:
        trained: measurements of every model with every plan.
    """
    first = settings.specs[0]
    chosen = [run for run in trained if run.spec == first and run.case in FITTED]
    profile = merge_profiles(
        [fit_profile(run.plan, run.run, run.spec, run.topology, run.rows, run.case) for run in chosen]
    )
    rows = [_row(run, run in chosen, profile) for run in trained]
    record = machine_and_versions("plan --own", asdict(settings))
    record["settings"]["specs"] = [spec.model_dump(exclude_none=True) for spec in settings.specs]
    return record | {
        "rows": rows,
        "error_pct": _errors(rows, "step_time_s", "predicted_s", "profiled_s"),
        "memory_error_pct": _errors(rows, "peak_bytes", "predicted_bytes", "profiled_bytes"),
        "profile": profile.to_json(),
    }


def _errors(rows: Sequence[dict[str, Any]], measured: str, before: str, after: str) -> dict[str, Any]:
    """Return the errors of predictions, over the rows that the profile was not fitted to, as two dicts with the fields
    of `Errors`: 'before' without the profile, 'after' with it.

    Args:
        measured: key of the measured figure in a row.
        before, after: keys of the predictions without the profile and with it.
    """
    others = [row for row in rows if not row["fitted"]]
    return {
        name: asdict(errors_of([row[key] for row in others], [row[measured] for row in others]))
        for name, key in (("before", before), ("after", after))
    }


def _row(trained: Trained, fitted: bool, profile: CalibrationProfile) -> dict[str, Any]:
    """Return a row of the record: a plan's measured and predicted step time and peak memory, and the errors of the
    predictions in percent of the measured figure.

    An error above 0 means that the prediction is too slow or too large. Keys with 'profiled' are predictions with the
    profile, the other predictions are made with the package's constants.

    Args:
        fitted: whether the profile was fitted to this run.
    """
    usual_s, usual_bytes = _predicted(trained, None)
    profiled_s, profiled_bytes = _predicted(trained, profile)
    return {
        "case": trained.case, "model": _name(trained.spec), "fitted": fitted, "step_time_s": trained.step_time_s,
        "predicted_s": usual_s, "profiled_s": profiled_s, "peak_bytes": trained.peak_bytes,
        "predicted_bytes": usual_bytes, "profiled_bytes": profiled_bytes, "load_1min": trained.load_1min,
        "error_pct": 100 * (usual_s / trained.step_time_s - 1),
        "profiled_error_pct": 100 * (profiled_s / trained.step_time_s - 1),
        "memory_error_pct": 100 * (usual_bytes / trained.peak_bytes - 1),
        "profiled_memory_error_pct": 100 * (profiled_bytes / trained.peak_bytes - 1),
    }  # fmt: skip


def _predicted(trained: Trained, profile: CalibrationProfile | None) -> tuple[float, float]:
    """Return (predicted seconds of a step, predicted peak memory in bytes of the worker that needs most).

    Args:
        profile: factors on the cost model's constants; None for the constants themselves.
    """
    plan = trained.plan.model_copy(update={"profile": profile})
    scene = layout_of_plan(trained.run, trained.spec, plan, trained.topology)
    seconds = predict(scene.cost, scene.layout, whole=True).total
    return seconds, max(scene.layout.memory(scene.cost.memory).values())


def _name(spec: DecoderSpec) -> str:
    """Return the name of a model from its blocks and its width, as '4 × 256'."""
    return f"{spec.layers} × {spec.dim}"
