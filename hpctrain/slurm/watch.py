"""A watcher for any number of jobs: one call for all, less often while nothing changes, and again after failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.base.errors import CommandError
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm
from hpctrain.slurm.job import JobInfo

DELAY_MIN_S = 1.0
DELAY_MAX_S = 30.0


@dataclass(frozen=True)
class JobChange:
    """A change of one job."""

    job_id: str
    before: JobInfo | None
    """The job before the change; None: it is new."""
    after: JobInfo | None
    """The job after the change; None: Slurm no longer knows it."""


class JobWatcher:
    """A watcher of jobs. The caller owns the clock: it calls `poll(now)` in its loop, ideally at `next_s`.

    `known` holds the last description of each job. While the controller is unreachable it does not change; `away` then
    holds the error's text, and `away_since_s` the time of the first failed call.
    """

    def __init__(self, slurm: Slurm, job_ids: Sequence[str] = (), delay_min_s: float = DELAY_MIN_S) -> None:
        """
        Args:
            delay_min_s: the shortest time between two calls, in seconds.
        """
        self._slurm = slurm
        self._job_ids = list(job_ids)
        self._delay_min_s = delay_min_s
        self._forgotten: set[str] = set()
        self.known: dict[str, JobInfo] = {}
        self.away: str | None = None
        self.away_since_s: float | None = None
        self.delay_s = delay_min_s
        self.next_s = 0.0
        self._asked_s: float | None = None

    def add(self, job_id: str) -> None:
        """Watch one more job; the next poll is due at once."""
        if job_id not in self._job_ids:
            self._job_ids.append(job_id)
        self._forgotten.discard(job_id)
        self.delay_s, self.next_s = self._delay_min_s, 0.0

    def poll_soon(self) -> None:
        """Make the next poll due after the shortest delay, because the jobs are known to have changed."""
        if self._asked_s is not None:
            self.delay_s, self.next_s = self._delay_min_s, min(self.next_s, self._asked_s + self._delay_min_s)

    def is_forgotten(self, job_id: str) -> bool:
        """Whether Slurm was asked for the job and does not, or no longer, know it."""
        return job_id in self._forgotten

    @property
    def all_ended(self) -> bool:
        """Whether every job has ended or is forgotten."""
        return all(
            job_id in self._forgotten or (job_id in self.known and self.known[job_id].state.is_ended)
            for job_id in self._job_ids
        )

    def poll(self, now: float) -> list[JobChange]:
        """Return what has changed; Slurm is asked only from `next_s` on.

        Args:
            now: seconds of any clock that never goes back.

        Raises:
            CommandError: Slurm refused, or its answer cannot be parsed.
        """
        if now < self.next_s:
            return []
        self._asked_s = now
        try:
            answer = self._slurm.jobs(self._asked())
        except ControllerUnreachableError as error:
            self.away, self.away_since_s = str(error), now if self.away_since_s is None else self.away_since_s
            self._wait(now, self._next_delay(changed=False))
            return []
        except CommandError:
            self._wait(now, self._next_delay(changed=False))
            raise
        was_away, self.away, self.away_since_s = self.away is not None, None, None
        changes = self._compare(answer)
        self._wait(now, self._next_delay(changed=bool(changes) or was_away))
        return changes

    def _asked(self) -> list[str]:
        return [job_id for job_id in self._job_ids if job_id not in self._forgotten]

    def _compare(self, answer: dict[str, JobInfo]) -> list[JobChange]:
        changes = []
        for job_id in self._asked():
            before, after = self.known.get(job_id), answer.get(job_id)
            if after is None:
                self._forgotten.add(job_id)
                changes.append(JobChange(job_id, before, None))
                continue
            self.known[job_id] = after
            if before is None or _matters(before) != _matters(after):
                changes.append(JobChange(job_id, before, after))
        return changes

    def _next_delay(self, changed: bool) -> float:
        return max(self._delay_min_s, next_delay(self.delay_s, changed))

    def _wait(self, now: float, delay_s: float) -> None:
        self.delay_s, self.next_s = delay_s, now + delay_s


def next_delay(delay_s: float, changed: bool) -> float:
    """Return the seconds to the next call: doubled up to 30 while nothing changes, 1 after a change."""
    return DELAY_MIN_S if changed else min(2 * delay_s, DELAY_MAX_S)


def _matters(job: JobInfo) -> tuple[object, ...]:
    """Return the fields whose change is reported; the estimates of start and end change all the time."""
    return job.state, job.reason, job.nodes, job.restarts, job.preempt_s
