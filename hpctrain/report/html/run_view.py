"""All data of a run that its report shows, read from the run folder. What is missing is None or empty."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpctrain.base.errors import FileError
from hpctrain.base.owned_files import read_owned
from hpctrain.base.units import format_bytes
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.ledger import ATTEMPTS_FILE
from hpctrain.records.history.node_log import NODE_LOG
from hpctrain.records.history.provenance import (
    PROVENANCE_FILE,
    NodeEnvironment,
    RunProvenance,
    read_environments,
)
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import (
    Event,
    MetricRow,
    RankPlacement,
    last_row_of_each_step,
    read_events,
    read_metrics,
)
from hpctrain.records.history.step_spans import StepSpans, recorded_steps, spans_file
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.cost import AttemptSpan, attempt_spans
from hpctrain.report.device_hours import DeviceHours, read_device_hours
from hpctrain.report.energy import RunEnergy, read_energy
from hpctrain.report.rank_history import RankHistory, read_rank_history
from hpctrain.report.rank_times import read_last_layers, read_last_rank_rows, slow_rank_text
from hpctrain.report.status import AT_WORK, RunStatus, decide_status, lock_held
from hpctrain.report.summaries import FaultRecovery, recoveries, steady_step_time

_PLAN = re.compile(r"^plan(?:-(\d+))?\.json$")

Value = TypeVar("Value")


@dataclass(frozen=True)
class PlanUse:
    """A plan of a run, and the metrics of the steps that were made with it."""

    file: str
    """Name of the plan's file."""
    plan: Plan
    generations: list[int]
    """Numbers of the generations that used the plan, according to the events."""
    rows: list[MetricRow]
    """Metrics of the steps that were made with the plan."""

    @property
    def step_time_s(self) -> float | None:
        """Median measured time of a step in seconds; None without steps. The first step of each generation, which takes
        longer, counts only if there are no other steps."""
        return steady_step_time(self.rows)

    @property
    def memory_bytes(self) -> float | None:
        """Largest measured memory of any worker, in bytes; None if it was not measured."""
        return max((row.memory_bytes_max for row in self.rows if row.memory_bytes_max is not None), default=None)

    @property
    def placement(self) -> list[RankPlacement]:
        """For each rank, the device, blocks and micro-batches that its worker reported; [] if none reported."""
        return next((row.placement for row in self.rows if row.placement), [])


@dataclass(frozen=True)
class RunView:
    """The data of a run that a report shows."""

    folder: str
    """Name of the run folder, without its path."""
    written_s: float
    """Time at which the report was made, in seconds since 1970."""
    run: Run
    run_text: str
    """Text of the run folder's run.yaml."""
    status: RunStatus
    events: list[Event]
    recoveries: list[FaultRecovery]
    """The run's recoveries, in order."""
    rows: list[MetricRow]
    """Every row of metrics.jsonl, including repeated steps."""
    history: list[MetricRow]
    """One row for each step, the one that led to the final model."""
    topology: Topology | None = None
    plans: list[PlanUse] = field(default_factory=list)
    """The run's plans, in the order of their first use."""
    provenance: RunProvenance | None = None
    """What the run was submitted with; None for a run of an earlier hpctrain, or if the file is damaged."""
    environments: list[NodeEnvironment] = field(default_factory=list)
    """Software and devices of each node in each attempt."""
    rank_rows: list[RankRow] = field(default_factory=list)
    """Where the time of each rank went in the last steps of which metrics-ranks.jsonl tells."""
    rank_history: RankHistory = field(default_factory=lambda: RankHistory([], True))
    """Times of the ranks over the run."""
    layers: list[LayerFigures] = field(default_factory=list)
    """The newest figures of each layer over all ranks; [] where none were measured."""
    spans: list[AttemptSpan] = field(default_factory=list)
    """Times of the attempts."""
    device_hours: DeviceHours | None = None
    """What the device-hours were spent on; None without an attempt."""
    energy: RunEnergy | None = None
    """What energy the run used; None if none could be read, or its file has more than `NODE_LOG_BYTES`."""
    recorded_step: StepSpans | None = None
    """The newest step of which each rank recorded its operations; None without one of at most `SPANS_BYTES`."""
    damaged: list[str] = field(default_factory=list)
    """Lines that name the files that could not be read, each with the reason."""

    @property
    def submitted_s(self) -> float | None:
        """Time at which the run was submitted, in seconds since 1970; None if it is not known, and for local runs."""
        if self.provenance is None or self.run.cluster.kind == "local":
            return None
        return datetime.fromisoformat(self.provenance.created.replace("Z", "+00:00")).timestamp()

    @property
    def start_s(self) -> float | None:
        """Time of the first event or of the beginning of the first step, whichever is earlier, in seconds since 1970;
        None without both. The report shows other times as seconds after this time."""
        times = [event.time_s for event in self.events[:1]] + [row.time_s - row.step_time_s for row in self.rows[:1]]
        return min(times, default=None)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from the time that `start_s` describes to the last event or step, including pauses between attempts;
        None without events and steps."""
        times = [event.time_s for event in self.events] + [row.time_s for row in self.rows]
        times += [row.time_s - row.step_time_s for row in self.rows[:1]]
        return max(times) - min(times) if times else None


def read_run_view(folder: Path, now: float) -> RunView:
    """Return what a report shows of the run in `folder`, which may have ended or be in progress.

    Args:
        now: wall clock, seconds since 1970.

    Raises:
        FileError: run.yaml is missing or invalid. Any other damaged file is named in the report instead.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
    """
    damaged: list[str] = []
    run = run_of(folder)
    held = lock_held(folder)
    attempts = _or_damaged(read_jsonl, folder / ATTEMPTS_FILE, damaged) or []
    events = _or_damaged(read_events, folder / "events.jsonl", damaged) or []
    rows = _or_damaged(read_metrics, folder / "metrics.jsonl", damaged) or []
    ranks = read_last_rank_rows(folder)
    status = decide_status(run, events, rows, now, held, attempts, slow_rank=slow_rank_text(ranks))
    until = now if status.state in AT_WORK else None
    signs = [*(event.time_s for event in events), *(row.time_s for row in rows)]
    return RunView(
        folder=folder.name,
        written_s=now,
        run=run,
        run_text=read_owned(folder / "run.yaml").decode("utf-8"),
        status=status,
        events=events,
        recoveries=recoveries(events),
        rows=rows,
        history=last_row_of_each_step(rows),
        topology=_topology(folder, damaged),
        plans=_plans(folder, events, rows, damaged),
        provenance=_provenance(folder, damaged),
        environments=_or_damaged(read_environments, folder, damaged) or [],
        rank_rows=ranks,
        rank_history=read_rank_history(folder, len(ranks)),
        layers=read_last_layers(folder),
        spans=attempt_spans(attempts, signs, until),
        device_hours=read_device_hours(folder, run, attempts, rows, events, until),
        energy=_energy(folder, run, rows, damaged),
        recorded_step=_recorded_step(folder, damaged),
        damaged=damaged,
    )


NODE_LOG_BYTES = 64 << 20
"""Largest metrics-nodes.jsonl that the report reads: about 40,000 lines of nodes with 8 GPUs, which take seconds."""


def _energy(folder: Path, run: Run, rows: list[MetricRow], damaged: list[str]) -> RunEnergy | None:
    path = folder / NODE_LOG
    size = path.stat().st_size if path.exists() else 0
    if size > NODE_LOG_BYTES:
        damaged.append(f"{path}: {format_bytes(size)} are too much for a report; `hpctrain status` sums the energy up")
        return None
    return _or_damaged(lambda path: read_energy(path.parent, run, rows), path, damaged)


SPANS_BYTES = 8 << 20
"""Largest record of a step that the report reads, of about 3,000 ranks."""


def _recorded_step(folder: Path, damaged: list[str]) -> StepSpans | None:
    paths = [spans_file(folder, step) for step in recorded_steps(folder)]
    small = [path for path in paths if path.stat().st_size <= SPANS_BYTES]
    return _or_damaged(partial(StepSpans.read, owned=True), small[-1], damaged) if small else None


def _topology(folder: Path, damaged: list[str]) -> Topology | None:
    path = folder / "topology.json"
    return _or_damaged(partial(Topology.read, owned=True), path, damaged) if path.exists() else None


def _provenance(folder: Path, damaged: list[str]) -> RunProvenance | None:
    path = folder / PROVENANCE_FILE
    return _or_damaged(partial(RunProvenance.read, owned=True), path, damaged) if path.exists() else None


def _plans(folder: Path, events: list[Event], rows: list[MetricRow], damaged: list[str]) -> list[PlanUse]:
    """Return the first plan of the run and then its replacements, each with the generations and steps that used it.

    Args:
        damaged: gets a line for each plan that cannot be read.
    """
    used = _generations_by_plan(events)
    uses = []
    # plan.json, then plan-<generation>.json in order.
    numbered = [(int(match[1] or -1), path) for path in folder.iterdir() if (match := _PLAN.match(path.name))]
    for _, path in sorted(numbered):
        plan = _or_damaged(partial(Plan.read, owned=True), path, damaged)
        if plan is not None:
            generations = used.get(path.name, [])
            steps = [row for row in rows if row.generation in generations]
            uses.append(PlanUse(path.name, plan, generations, steps))
    return uses


def _generations_by_plan(events: list[Event]) -> dict[str, list[int]]:
    """Return the numbers of the generations that used each plan file of the run folder, by the file's name.

    A generation may name a copy of its plan in `generations/`. The last event `planned`, `replanned` or `adapted`
    before the first such generation names the file that was copied; later generations with that plan name the same
    copy.
    """
    used: dict[str, list[int]] = {}
    newest = "plan.json"
    copies: dict[str, str] = {}
    for event in events:
        named = str(event.data.get("plan", newest))
        if event.kind in ("planned", "replanned", "adapted"):
            newest = named
        elif event.kind == "generation_started":
            file = named if _PLAN.match(named) else copies.setdefault(named, newest)
            used.setdefault(file, []).append(event.generation)
    return used


def _or_damaged(read: Callable[[Path], Value], path: Path, damaged: list[str]) -> Value | None:
    """Return what `read` returns for the file; if the file cannot be read, add a line to `damaged` and return None."""
    try:
        return read(path)
    except FileError as error:
        damaged += str(error).splitlines()
        return None
