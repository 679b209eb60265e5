"""`hpctrain bench agreement`: the agents' own code under seeded schedules of faults, on a simulated clock."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.agent.tree.order import FAN_OUT, FULL_MESH_NODES
from hpctrain.bench.record import make_record
from hpctrain.bench.recovery.agreement_schedules import KINDS, TREE_FAN_OUT, ScheduleOutcome, run_seed
from hpctrain.bench.recovery.large_job import measure_large_job
from hpctrain.bench.recovery.simulated_world import HEARTBEAT_TIMEOUT_S, InvariantViolation

CHUNK = 250
"""Schedules that a process runs before it reports."""
SHOWN = 20
"""Most broken schedules that the record names."""


@dataclass
class AgreementRow:
    """The schedules of one kind."""

    case: str
    """Kind of the schedules, described in `agreement_schedules`."""
    schedules: int = 0
    trees: int = 0
    """Schedules in which the agents formed a tree."""
    faults: int = 0
    """Faults in all schedules."""
    generations: int = 0
    """Generations of all schedules together."""
    turns: int = 0
    """Turns of all agents in all schedules."""
    messages: int = 0
    """Messages between agents in all schedules, heartbeats included."""
    simulated_s: float = 0.0
    """Simulated seconds of all schedules together."""
    broken: int = 0
    """Number of schedules in which a rule did not hold."""
    settled_median_s: float | None = None
    settled_max_s: float | None = None
    """`settled_median_s` and `settled_max_s`: median and maximum of `ScheduleOutcome.settled_s` over the schedules that
    have it; None if none has."""
    settled: list[float] = field(default_factory=list)
    """`ScheduleOutcome.settled_s` of each schedule that has it; the record leaves this list out."""


def measure_agreement(
    count: int, first: int, processes: int, agents: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the schedules of `count` seeds; return the record of the bench.

    Args:
        first: the first seed.
        processes: processes that run schedules side by side.
        agents: agents of the large job that loses nodes, at least 8.
        progress: called with what is being measured.

    Raises:
        InvariantViolation: the agents of the large job broke a rule. A schedule that breaks a rule is only counted.
    """
    progress(f"{count} schedules from seed {first}, in {processes} processes")
    chunks = [(begin, min(begin + CHUNK, first + count)) for begin in range(first, first + count, CHUNK)]
    rows = {kind: AgreementRow(kind) for kind in KINDS}
    violations: list[str] = []
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        for outcomes, broken in pool.map(_run_chunk, chunks):
            for outcome in outcomes:
                _count(rows[outcome.kind], outcome)
            for kind, message in broken:
                rows[kind].schedules += 1
                rows[kind].broken += 1
                violations.append(message)
    for row in rows.values():
        if row.settled:
            row.settled_median_s, row.settled_max_s = statistics.median(row.settled), max(row.settled)
        row.settled = []
    settings = {"first": first, "count": count, "processes": processes, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    progress(f"the loss of nodes in a job of {agents} agents")
    with silence():
        large = measure_large_job(agents, FAN_OUT if agents > FULL_MESH_NODES else TREE_FAN_OUT)
    record = make_record("agreement", [*rows.values(), *large], settings)
    for row in record["rows"]:
        row.pop("settled", None)
    return record | {"seconds": time.perf_counter() - begin, "violations": violations[:SHOWN]}


def _count(row: AgreementRow, outcome: ScheduleOutcome) -> None:
    row.schedules += 1
    row.trees += outcome.in_tree
    row.faults += len(outcome.faults)
    row.generations += outcome.generations
    row.turns += outcome.turns
    row.messages += outcome.messages
    row.simulated_s += outcome.simulated_s
    if outcome.settled_s is not None:
        row.settled.append(outcome.settled_s)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what agents print for the log of a run."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _run_chunk(seeds: tuple[int, int]) -> tuple[list[ScheduleOutcome], list[tuple[str, str]]]:
    """Run the schedules of the seeds from `seeds[0]` to below `seeds[1]`. Return the outcomes, and (kind, message) of
    each schedule that broke a rule."""
    outcomes, broken = [], []
    with silence():
        for seed in range(*seeds):
            try:
                outcomes.append(run_seed(seed))
            except InvariantViolation as violation:
                broken.append((violation.kind, str(violation)))
    return outcomes, broken
