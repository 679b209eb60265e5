"""The faults that `hpctrain bench recovery` gives to a job on a lab, and what each of them cost the job."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.bench.recovery.lab_jobs import LabSite, TrainedStep, TrainingJob
from hpctrain.lab.faults import kill_nodes
from hpctrain.lab.machine import ProcessTable

CASES = ("worker_killed", "node_killed", "node0_killed", "node_silent")


@dataclass(frozen=True)
class FaultSample:
    """What one fault cost a job. If the job made no further step, all figures of its recovery are None, and `reason`
    says why."""

    case: str
    """Name of the case in `CASES`."""
    system: str
    """Name of the system in `lab_recovery.SYSTEMS`."""
    number: int
    """Number of the fault among those of its case and system."""
    node: str
    """Node of the fault."""
    step_s: float
    """Median duration of a step of the job before the fault."""
    seconds: float | None = None
    """Time from the fault to the end of the first step after it, less `step_s`."""
    caught_up_s: float | None = None
    """Time from the fault to the end of the first step that the job had not done before, less `step_s`."""
    lost_steps: int | None = None
    """Steps done before the fault that the state after it did not have."""
    redone_steps: int | None = None
    """Steps done before the fault that were done again."""
    loss_difference: float | None = None
    """Largest difference of the losses after the fault from those of a run without faults."""
    reason: str | None = None


class _KillTimes(ProcessTable):
    """The processes of this machine; remembers when the last SIGKILL was sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last_s: float | None = None

    def signal(self, pid: int, number: int) -> None:
        super().signal(pid, number)
        if number == signal.SIGKILL:
            self.last_s = self._clock.wall()


def victim_of(case: str, number: int, nodes: Sequence[str]) -> str:
    """Return the node of a fault. The nodes take turns by the number of the fault; the first node, where the job script
    runs, has only the faults node0_killed and worker_killed."""
    if case == "node0_killed":
        return nodes[0]
    return nodes[number % len(nodes)] if case == "worker_killed" else nodes[1 + number % (len(nodes) - 1)]


def inject(site: LabSite, job: TrainingJob, case: str, node: str) -> float:
    """Cause a fault of a job, and return its time in seconds since 1970: that of the last SIGKILL, or, for node_silent,
    the time before the node's link went down.

    Raises:
        CommandError: the node has no training process, or a process of it does not end.
    """
    kills = _KillTimes(site.machine.clock)
    before_s = site.machine.clock.wall()
    if case == "worker_killed":
        pid = job.worker(node)
        if pid is None:
            raise CommandError(f"bench recovery: no training process on {node}; see {job.folder}")
        kills.signal(pid, signal.SIGKILL)
    else:
        how: Literal["kill", "silent"] = "silent" if case == "node_silent" else "kill"
        kill_nodes(replace(site.machine, processes=kills), site.layout, [node], how)
    return before_s if case == "node_silent" or kills.last_s is None else kills.last_s


def usual_step_s(steps: Sequence[TrainedStep]) -> float:
    """Return the median duration of a step. The first step of each start of the workers does not count, because it
    includes set-up; `steps` must have at least one other step."""
    lives = [step.life for step in steps]
    return statistics.median(s.step_time_s for s, life in zip(steps[1:], lives, strict=False) if s.life == life)


def cost_of(
    sample: FaultSample, fault_s: float, before: Sequence[TrainedStep], steps: Sequence[TrainedStep]
) -> FaultSample | None:
    """Return `sample` with what its fault cost; None while the job has not caught up with the steps before the fault.

    Args:
        fault_s: time of the fault, seconds since 1970.
        before: steps before the fault.
        steps: all steps of the job so far.
    """
    old = {step.life for step in before}
    after = [step for step in steps if step.life not in old and step.time_s > fault_s]
    done = max(step.step for step in steps if step.life in old)
    new = next((step for step in after if step.step > done), None)
    if new is None:
        return None
    return replace(
        sample,
        seconds=after[0].time_s - fault_s - sample.step_s,
        caught_up_s=new.time_s - fault_s - sample.step_s,
        lost_steps=max(0, done - after[0].step + 1),
        redone_steps=len({step.step for step in after if step.step <= done}),
    )


def loss_difference(steps: Sequence[TrainedStep], undisturbed: Mapping[int, float]) -> float | None:
    """Return the largest difference of the steps' losses from those of the run without faults; None if it has none of
    these steps.

    Args:
        undisturbed: step -> loss of the run without faults.
    """
    return max((abs(step.loss - undisturbed[step.step]) for step in steps if step.step in undisturbed), default=None)


@dataclass(frozen=True)
class RecoveryRow:
    """What the faults of one case cost one system. Figures of time and steps are over the `n` faults after which the
    job went on."""

    case: str
    """Name of the case in `CASES`."""
    system: str
    """Name of the system in `lab_recovery.SYSTEMS`."""
    n: int
    """Faults after which the job made further steps."""
    not_recovered: int
    """Faults after which the job made no further step within the limit."""
    step_s: float
    """Median duration of a step before the faults."""
    median_s: float | None = None
    p95_s: float | None = None
    """`median_s`, `p95_s`: median and 95th percentile of the time from the fault to the end of the first step after it,
    less a median step."""
    low_s: float | None = None
    high_s: float | None = None
    """`low_s`, `high_s`: first and third quartile of the same time."""
    caught_up_s: float | None = None
    """Median time from the fault to the end of the first step that had not been done before, less a median step."""
    lost_steps_max: int | None = None
    redone_steps_max: int | None = None
    """`lost_steps_max`, `redone_steps_max`: largest `lost_steps` and `redone_steps` of the samples."""
    loss_difference_max: float | None = None
    """Largest difference of a loss from that of the run without faults; 0: all are equal, bit by bit. Only for
    hpctrain."""
    reason: str | None = None
    """Why the last job that did not recover made no further step."""


def row_of(samples: Sequence[FaultSample]) -> RecoveryRow:
    """Return the row of the samples, which are of one case and one system; there is at least one."""
    times = [sample.seconds for sample in samples if sample.seconds is not None]
    first = samples[0]
    row = RecoveryRow(
        first.case, first.system, len(times), len(samples) - len(times),
        statistics.median(sample.step_s for sample in samples),
        reason=next((sample.reason for sample in reversed(samples) if sample.reason), None),
    )  # fmt: skip
    if not times:
        return row
    low, middle, high, late = (float(value) for value in np.percentile(times, [25, 50, 75, 95]))
    return replace(
        row, median_s=middle, p95_s=late, low_s=low, high_s=high,
        caught_up_s=statistics.median(s.caught_up_s for s in samples if s.caught_up_s is not None),
        lost_steps_max=max(s.lost_steps for s in samples if s.lost_steps is not None),
        redone_steps_max=max(s.redone_steps for s in samples if s.redone_steps is not None),
        loss_difference_max=max((s.loss_difference for s in samples if s.loss_difference is not None), default=None),
    )  # fmt: skip


def as_json(sample: FaultSample) -> dict[str, object]:
    """Return the sample's fields as JSON values, without those that are None."""
    return {key: value for key, value in asdict(sample).items() if value is not None}
