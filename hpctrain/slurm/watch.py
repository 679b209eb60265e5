"""Watches any number of jobs with one Slurm command for all. It asks less often while nothing changes, and keeps asking
if the controller does not answer."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.slurm.commands import ControllerUnreachableError, Slurm
from hpctrain.slurm.job import JobInfo

DELAY_MIN_S = 1.0
"""Seconds between two calls after a change."""
DELAY_MAX_S = 30.0
"""Most seconds between two calls while nothing changes."""


class JobWatcher:
    """A watcher of jobs. It has no clock: the caller calls `poll(now)` in a loop, best when `now` reaches `next_s`.

    `known` is Slurm's last description of each job, by id. While the controller is unreachable, `known` stays as it is,
    `away` is the error's text, and `away_since_s` the `now` of the first failed call; both are None otherwise.
    """

    def __init__(self, slurm: Slurm, job_ids: Sequence[str] = (), delay_min_s: float = DELAY_MIN_S) -> None:
        """Begin to watch the jobs in `job_ids`; Slurm is not asked before the first `poll`.

        Args:
            delay_min_s: the shortest time between two polls, in seconds, unless a job is added.
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
        """Watch one more job, and make the next poll due at once."""
        if job_id not in self._job_ids:
            self._job_ids.append(job_id)
        self._forgotten.discard(job_id)
        self.delay_s, self.next_s = self._delay_min_s, 0.0

    def poll_soon(self) -> None:
        """Make the next poll due after the shortest delay, because the jobs are known to have changed."""
        if self._asked_s is not None:
            self.delay_s, self.next_s = self._delay_min_s, min(self.next_s, self._asked_s + self._delay_min_s)

    def is_forgotten(self, job_id: str) -> bool:
        """Return whether Slurm was asked about the job and does not know it (any more)."""
        return job_id in self._forgotten

    @property
    def all_ended(self) -> bool:
        """Whether every watched job has ended or is no longer known to Slurm."""
        return all(
            job_id in self._forgotten or (job_id in self.known and self.known[job_id].is_ended)
            for job_id in self._job_ids
        )

    def poll(self, now: float) -> bool:
        """Ask Slurm for the watched jobs if `now` has reached `next_s`; return whether a job is new, changed or no
        longer known to Slurm.

        Args:
            now: seconds of any clock that never goes back; the same clock at each call.

        Raises:
            CommandError: Slurm refused, or its answer cannot be parsed.
        """
        if now < self.next_s:
            return False
        self._asked_s, changed, back = now, False, False
        try:
            answer = self._slurm.jobs(self._asked())
            back, self.away, self.away_since_s = self.away is not None, None, None
            changed = self._update(answer)
        except ControllerUnreachableError as error:
            self.away, self.away_since_s = str(error), now if self.away_since_s is None else self.away_since_s
        finally:
            self.delay_s = max(self._delay_min_s, next_delay(self.delay_s, changed or back))
            self.next_s = now + self.delay_s
        return changed

    def _asked(self) -> list[str]:
        return [job_id for job_id in self._job_ids if job_id not in self._forgotten]

    def _update(self, answer: dict[str, JobInfo]) -> bool:
        """Update `known`, the watched jobs by id, from Slurm's answer; return whether a job is new, changed or no
        longer known to Slurm."""
        asked = self._asked()
        present = {job_id: answer[job_id] for job_id in asked if job_id in answer}
        before, self.known = self.known, {**self.known, **present}
        self._forgotten.update(set(asked) - set(present))
        moved = [job for job_id, job in present.items() if _matters(before.get(job_id)) != _matters(job)]
        return len(present) < len(asked) or bool(moved)


def next_delay(delay_s: float, changed: bool) -> float:
    """Return the seconds until Slurm is asked again: 1 if its last answer differed from the one before, else twice the
    last pause `delay_s`, at most 30."""
    return DELAY_MIN_S if changed else min(2 * delay_s, DELAY_MAX_S)


def _matters(job: JobInfo | None) -> tuple[object, ...] | None:
    """Return the fields of a job whose change counts as a change of the job; None for no job. The expected times of
    start and end are left out, because they change all the time."""
    return None if job is None else (job.state, job.reason, job.nodes, job.restarts, job.preempt_s)
