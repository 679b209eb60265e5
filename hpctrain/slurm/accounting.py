"""Reads ended jobs from Slurm's accounting (`sacct`), which remembers them longer than the controller does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.slurm.fields import SEPARATOR, split_columns
from hpctrain.slurm.job import JobInfo, job_of_columns

_COLUMNS = {
    "JobID": "JobID", "State": "State", "ExitCode": "exit_code", "NodeList": "NodeList", "Submit": "SubmitTime",
    "Start": "StartTime", "End": "EndTime", "Timelimit": "TimeLimit", "Partition": "Partition", "Reason": "Reason",
}  # fmt: skip
"""sacct's name of a field -> squeue's."""


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """Return the sacct command for some jobs; its answer has one line for each time that a job was in the queue.

    Every option is explicit: a person's SACCT_FORMAT or the site's defaults would change the answer.
    """
    return [
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
        f"--format={','.join(_COLUMNS)}", f"--jobs={','.join(ids)}",
    ]  # fmt: skip


def parse_sacct(text: str) -> dict[str, JobInfo]:
    """Return the ended jobs in sacct's answer, by id; for a requeued job, the entry of its last time in the queue.

    Jobs that accounting shows as running or waiting are left out: the controller does not know them, so their end was
    never recorded.

    Raises:
        CommandError: a line does not have the requested fields.
    """
    times: dict[str, list[JobInfo]] = {}
    for values in split_columns(text, list(_COLUMNS.values()), "sacct"):
        times.setdefault(values["JobID"], []).append(job_of_columns(values))
    newest = {job_id: max(jobs, key=lambda job: job.submit_s or 0.0) for job_id, jobs in times.items()}
    return {
        job_id: replace(job, restarts=len(times[job_id]) - 1) for job_id, job in newest.items() if job.state.is_ended
    }
