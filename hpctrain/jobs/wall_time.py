"""Predicts from the step time of a run's plan how long the run takes, how many GPU-hours it costs, and whether its time
limit is enough. All functions are pure, except that `measured_start_up_s` reads files."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import open_owned
from hpctrain.base.units import format_seconds
from hpctrain.jobs.partition_checks import SIGNAL_EARLY_S
from hpctrain.records.format.input_file import LINE_BYTES, parse_json_line
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import RunFolder
from hpctrain.slurm.values import format_time_limit

SUGGESTED_LIMIT_MARGIN = 1.25
"""Suggested time limit divided by the predicted time: an assumption about the error of the prediction."""
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

    @property
    def total_s(self) -> float:
        """Seconds of the whole run as one job: its start and all its steps."""
        return self.step_s * self.steps + (self.start_up_s or 0.0)

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
        """Return a time limit in seconds that should be enough for the whole run as one job.

        Args:
            notice_s: cluster.save_notice_s.
        """
        wanted = self.total_s * SUGGESTED_LIMIT_MARGIN + notice_s + SIGNAL_EARLY_S
        return math.ceil(wanted / SUGGESTED_LIMIT_STEP_S) * SUGGESTED_LIMIT_STEP_S


def duration_text(time: WallTime, topology: Topology) -> str:
    """Return a sentence with the predicted duration and the GPU-hours of all GPUs in the topology; without GPUs, the
    node-hours."""
    start_up = (
        f"start-up {format_seconds(time.start_up_s)} as in an earlier run"
        if time.start_up_s
        else ("start-up not counted, as no earlier run has measured it")
    )
    gpus = sum(topology.device_types[device.type].kind == "cuda" for node in topology.nodes for device in node.devices)
    count, unit = (gpus, "GPU-hours") if gpus else (len(topology.nodes), "node-hours")
    return (
        f"about {format_seconds(time.total_s)} for {time.steps:,} steps: {time.total_s / 3600 * count:.3g} {unit} "
        f"({start_up}; pauses for checkpoints and validation not counted)"
    )


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
    if jobs > 1:
        return f"{what} means about {jobs} jobs, one after the other; {enough}"
    if limit_s > 2 * time.suggested_s(notice_s):
        return f"{what} is more than it needs; {enough}, and short jobs often start earlier"
    return f"{what} should be enough for one job"


def measured_start_up_s(folder: Path) -> float | None:
    """Return the seconds from the start of the first attempt of the run in `folder` to the start of its first step;
    None if the first attempt made no step."""
    attempts = RunFolder(folder).attempts()
    try:
        # Read only the first line: the file may have millions.
        with os.fdopen(open_owned(folder / "metrics.jsonl"), "rb") as file:
            row = MetricRow.from_json(parse_json_line(file.readline(LINE_BYTES)))
    except (OSError, InputError):
        return None
    seconds = row.time_s - row.step_time_s - float(attempts[0]["start"]) if attempts else 0.0
    return seconds if seconds > 0 and row.step == 1 else None
