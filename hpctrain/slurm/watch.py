"""One watcher for any number of jobs: one call for all, rarer while nothing changes, patient with the controller."""

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
    """What is new about one job."""

    job_id: str
    before: JobInfo | None
    """None: it is seen for the first time."""
    after: JobInfo | None
    """None: Slurm has forgotten it."""


class JobWatcher:
    """Watches jobs. The caller owns the time: it calls `poll(now)` in its loop, at best at `next_s`.

    `known` holds the last description of each job. While the controller is away it stays as it was, `away` says in
    words that it is, and `away_since_s` since when.
    """

    def __init__(self, slurm: Slurm, job_ids: Sequence[str] = (), delay_min_s: float = DELAY_MIN_S) -> None:
        """
        Args:
            delay_min_s: fewest seconds between two calls.
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
        """Watch one more job, from the next poll on, which is due at once."""
        if job_id not in self._job_ids:
            self._job_ids.append(job_id)
        self._forgotten.discard(job_id)
        self.delay_s, self.next_s = self._delay_min_s, 0.0

    def poll_soon(self) -> None:
        """Ask as soon as the shortest delay allows: something else says that the jobs have changed."""
        if self._asked_s is not None:
            self.delay_s, self.next_s = self._delay_min_s, min(self.next_s, self._asked_s + self._delay_min_s)

    def is_forgotten(self, job_id: str) -> bool:
        """Whether Slurm was asked for the job and does not know it (any more)."""
        return job_id in self._forgotten

    @property
    def all_ended(self) -> bool:
        """Whether every job has ended or is forgotten."""
        return all(
            job_id in self._forgotten or (job_id in self.known and self.known[job_id].state.is_ended)
            for job_id in self._job_ids
        )

    def poll(self, now: float) -> list[JobChange]:
        """What has changed; asks Slurm only when the time has come.

        Args:
            now: seconds of any clock that never goes back.

        Raises:
            CommandError: Slurm answered, and refused or cannot be read.
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
    """Seconds to the next call: doubled up to 30 while nothing changes, 1 after a change."""
    return DELAY_MIN_S if changed else min(2 * delay_s, DELAY_MAX_S)


def _matters(job: JobInfo) -> tuple[object, ...]:
    """What makes a change worth telling; estimates of start and end move all the time."""
    return job.state, job.reason, job.nodes, job.restarts, job.preempt_s
