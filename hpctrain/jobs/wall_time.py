"""Predicts from the time of a step how long a run takes, how many GPU-hours it costs, and whether its time limit is
enough. The step time comes from a measured run, from a plan, or from data sheets. All functions are pure, except that
`measured_start_up_s` reads files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import open_owned
from hpctrain.base.units import format_seconds
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S
from hpctrain.records.format.input_file import LINE_BYTES, parse_json_line
from hpctrain.records.history.run_log import MetricRow
from hpctrain.runs.folder import RunFolder
from hpctrain.slurm.values import format_time_limit

SUGGESTED_LIMIT_MARGIN = 1.25
"""Least suggested time limit divided by the predicted time, for runs that were measured: other jobs share the network
and the file system."""
SUGGESTED_LIMIT_STEP_S = 300
"""Suggested time limits are multiples of this many seconds."""


@dataclass(frozen=True)
class TimeLimit:
    """A job's time limit, and who set it: you or the partition."""

    seconds: int | None
    """Seconds; None: no limit."""
    given: bool
    """Whether you set the limit; else it is the partition's."""


@dataclass(frozen=True)
class WallTime:
    """The predicted duration of a run: start-up time, if it was measured, and the steps."""

    step_s: float
    """Predicted seconds of one step."""
    steps: int
    """Number of steps."""
    start_up_s: float | None
    """Seconds from the job's start to its first step, by an earlier run on these nodes; None: not measured."""
    range_s: tuple[float, float] | None = None
    """Quantiles 0.1 and 0.9 of the seconds of a step, over the steps of an earlier run or over published runs; None:
    not known.
    """

    @property
    def total_s(self) -> float:
        """Seconds of the whole run as one job: all its steps, and the start-up time if it was measured."""
        return self.step_s * self.steps + (self.start_up_s or 0.0)

    def at(self, step_s: float) -> WallTime:
        """Return the same prediction with `step_s` seconds for each step, and without a range."""
        return replace(self, step_s=step_s, range_s=None)

    def jobs(self, limit_s: float, notice_s: float) -> int | None:
        """Return the number of jobs that the run takes, each with its start-up and its save notice; None if the time
        limit is over before a job trains.

        Args:
            limit_s: time limit of each job, in seconds.
            notice_s: cluster.save_notice_s.
        """
        useful_s = limit_s - notice_s - SIGNAL_EARLY_S - (self.start_up_s or 0.0)
        return math.ceil(self.step_s * self.steps / useful_s) if useful_s > 0 else None

    def suggested_s(self, notice_s: float) -> int:
        """Return a time limit in seconds that should be enough for the whole run as one job, at the slow end of the
        range.

        Args:
            notice_s: cluster.save_notice_s.
        """
        slow_s = self.at(self.range_s[1]).total_s if self.range_s else 0.0
        wanted = max(slow_s, self.total_s * SUGGESTED_LIMIT_MARGIN) + notice_s + SIGNAL_EARLY_S
        return math.ceil(wanted / SUGGESTED_LIMIT_STEP_S) * SUGGESTED_LIMIT_STEP_S


@dataclass(frozen=True)
class BilledResources:
    """What is billed for a job while it runs."""

    nodes: int
    gpus: int
    """GPUs of all nodes; 0 for a job on CPUs, whose price is shown in node-hours."""
    units_per_h: float | None = None
    """Slurm's billing units for the whole job in one hour; None: not known."""


def duration_text(time: WallTime, billed: BilledResources) -> str:
    """Return a sentence with the predicted duration and the billed GPU-hours, without GPUs the node-hours, each with
    its range if it is known; and with Slurm's billing units, if they are known."""
    start_up = (
        f"start-up {format_seconds(time.start_up_s)} as in an earlier run"
        if time.start_up_s
        else ("start-up not counted, as no earlier run has measured it")
    )
    ends = [time.at(step_s) for step_s in time.range_s] if time.range_s else []

    def amount(per_h: float) -> str:
        low_to_high = " to ".join(_plain(end.total_s / 3600 * per_h) for end in ends)
        return _plain(time.total_s / 3600 * per_h) + (f" ({low_to_high})" if ends else "")

    count, unit = (billed.gpus, "GPU-hours") if billed.gpus else (billed.nodes, "node-hours")
    span = f" ({' to '.join(format_seconds(end.total_s) for end in ends)})" if ends else ""
    units = f", {amount(billed.units_per_h)} billing units" if billed.units_per_h is not None else ""
    return (
        f"about {format_seconds(time.total_s)}{span} for {time.steps:,} steps: {amount(count)} {unit}{units} "
        f"({start_up}; pauses for checkpoints and validation not counted)"
    )


def total_text(runs: Sequence[tuple[WallTime, BilledResources]]) -> str:
    """Return a sentence with what several runs together are billed, in GPU-hours, without GPUs in node-hours.

    Args:
        runs: the predicted time and the resources of each run, at least one; all have GPUs or none has.
    """
    hours = sum(time.total_s / 3600 * (billed.gpus or billed.nodes) for time, billed in runs)
    return f"all {len(runs)} runs together: about {_plain(hours)} {'GPU' if runs[0][1].gpus else 'node'}-hours"


def _plain(value: float) -> str:
    """Return a number with three significant digits, without an exponent: 27.3, 1,050."""
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def time_limit_text(time: WallTime, limit: TimeLimit, notice_s: int) -> str:
    """Return a sentence that says what the time limit means for the run, and which limit would be enough.

    Args:
        time: the predicted duration of the run.
        limit: the time limit of a job.
        notice_s: cluster.save_notice_s.
    """
    limit_s = limit.seconds
    enough = f"{format_time_limit(time.suggested_s(notice_s))} should do for one job"
    what = ("cluster.time " if limit.given else "the partition's limit ") + format_time_limit(limit_s)
    if limit_s is None:
        return f"the job has no time limit; cluster.time {enough}, and short jobs often start earlier"
    jobs = time.jobs(limit_s, notice_s)
    if jobs is None:
        return f"{what} is over before the run trains; {enough}"
    ends = [time.at(step_s).jobs(limit_s, notice_s) for step_s in time.range_s] if time.range_s else [jobs]
    if max(end or jobs for end in ends) > 1:
        span = f" ({ends[0]} to {ends[-1]})" if ends[0] != ends[-1] else ""
        return f"{what} means about {jobs} job{'s' * (jobs > 1)}{span}, one after the other; {enough}"
    if limit_s > 2 * time.suggested_s(notice_s):
        return f"{what} is more than it needs; {enough}, and short jobs often start earlier"
    return f"{what} should be enough for one job"


def measured_start_up_s(folder: Path) -> float | None:
    """Return the seconds from the start of the first attempt of the run in `folder` to the start of its first step;
    None if the first attempt made no step, or attempts.jsonl or metrics.jsonl cannot be used."""
    try:
        attempts = RunFolder(folder).attempts()
        # Read only the first line: the file may have millions.
        with os.fdopen(open_owned(folder / "metrics.jsonl"), "rb") as file:
            row = MetricRow.from_json(parse_json_line(file.readline(LINE_BYTES)))
    except (OSError, InputError):
        return None
    start = attempts[0].get("start") if attempts else None
    seconds = row.time_s - row.step_time_s - start if isinstance(start, int | float) else 0.0
    return seconds if seconds > 0 and row.step == 1 else None
