"""Ended jobs from Slurm's accounting (`sacct`), which keeps them longer than the controller does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.base.errors import CommandError
from hpctrain.slurm.fields import node_names, number, text_or_none
from hpctrain.slurm.job import SEPARATOR, JobInfo, parse_state
from hpctrain.slurm.time import read_duration, read_moment

_COLUMNS = (
    "JobID", "State", "ExitCode", "NodeList", "Submit", "Start", "End", "Timelimit", "Partition", "Reason",
)  # fmt: skip


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """Return the sacct command for some jobs; its answer has one line for each time that a job was in the queue.

    Every option is explicit: a person's SACCT_FORMAT or the site's defaults would change the answer.
    """
    return [
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
        f"--format={','.join(_COLUMNS)}", f"--jobs={','.join(ids)}",
    ]  # fmt: skip


def parse_sacct(text: str) -> dict[str, JobInfo]:
    """Return the ended jobs in sacct's answer, by id; of a requeued job, its last time in the queue.

    Jobs that accounting shows as running or waiting are left out: the controller does not know them, so their end was
    never recorded.

    Raises:
        CommandError: a line does not have the requested fields.
    """
    times: dict[str, list[JobInfo]] = {}
    for line in text.splitlines():
        if line.strip():
            job = _job(line)
            times.setdefault(job.job_id, []).append(job)
    newest = {job_id: max(jobs, key=lambda job: job.submit_s or 0.0) for job_id, jobs in times.items()}
    return {
        job_id: replace(job, restarts=len(times[job_id]) - 1) for job_id, job in newest.items() if job.state.is_ended
    }


def _job(line: str) -> JobInfo:
    values = [value.strip() for value in line.split(SEPARATOR)]
    if len(values) != len(_COLUMNS):
        raise CommandError(f"sacct: {len(values)} fields in its answer '{line[:100]}', not {len(_COLUMNS)}")
    value = dict(zip(_COLUMNS, values, strict=True))
    code, _, by_signal = value["ExitCode"].partition(":")
    return JobInfo(
        job_id=value["JobID"],
        state=parse_state(value["State"]),
        reason=(text_or_none(value["Reason"]) or "").replace(" ", "_"),
        nodes=node_names(value["NodeList"]),
        restarts=0,
        start_s=read_moment(value["Start"]),
        end_s=read_moment(value["End"]),
        time_limit_s=read_duration(value["Timelimit"]),
        begin_s=None,
        preempt_s=None,
        batch_host=None,
        exit_code=number(code),
        exit_signal=number(by_signal),
        partition=value["Partition"],
        submit_s=read_moment(value["Submit"]),
    )
