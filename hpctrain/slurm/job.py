"""Jobs as Slurm describes them: the record of a job, and parsers of the output of scontrol, squeue (in SQUEUE_FORMAT)
and sacct that return it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from hpctrain.base.clock import utc_text
from hpctrain.base.units import format_seconds
from hpctrain.slurm.pending_reasons import is_stuck, pending_reason_text
from hpctrain.slurm.values import (
    SEPARATOR,
    node_names,
    number,
    parse_unsigned,
    read_duration,
    read_moment,
    records,
    required,
    split_columns,
    text_or_none,
)

JobState = Literal[
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
    "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    # Flags.
    "COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED",
    "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT",
    "STOPPED", "UPDATE_DB", "UNKNOWN",
]  # fmt: skip
"""State of a job, in Slurm's words. If a flag is set, Slurm shows the flag instead of the base state
(job_state_codes.html). UNKNOWN stands for any other word."""
_STATES: dict[str, JobState] = {state: state for state in get_args(JobState)}
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ENDED = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED",
)  # fmt: skip


@dataclass(frozen=True)
class JobInfo:
    """One job at one moment, as Slurm describes it. Times are seconds since 1970-01-01 UTC; None: Slurm gives no
    value."""

    job_id: str
    """The id as squeue shows it: '123', '123_4' for a task of a job array, '123_[5-9%2]' for tasks that wait."""
    state: JobState
    reason: str
    """Why the job waits or ended, as Slurm's code or as a sentence with '_' for blanks; "" for none."""
    nodes: tuple[str, ...]
    """Nodes that the job has now; () while it waits."""
    restarts: int
    """How often the job was requeued."""
    start_s: float | None
    """When the job started; for a waiting job, when Slurm expects it to start."""
    end_s: float | None
    """When the job ended, or when it will reach its time limit."""
    time_limit_s: int | None
    """The time limit in seconds; None: unlimited."""
    begin_s: float | None
    """Earliest moment at which the job may start: the requested one, or the end of the pause after a requeue."""
    preempt_s: float | None
    """When Slurm announced the job's preemption; its grace time begins then. None: it is not preempted."""
    batch_host: str | None
    """The batch node; None while the job waits."""
    exit_code: int | None
    """Exit code of the batch script; None before the end."""
    partition: str
    """The job's partition; while the job waits, all that it asks for, separated by commas."""
    submit_s: float | None
    """When the job was last put into the queue."""
    shares_nodes: bool | None = None
    """Whether other jobs may run on its nodes; None: Slurm does not say, as in answers of squeue and sacct."""

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits in the queue for its start, held or not."""
        return self.state in _WAITING

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended, and Slurm does not requeue it: a job that is being requeued is COMPLETING or
        PENDING."""
        return self.state in _ENDED


_COLUMNS = (
    "JobArrayID", "State", "Reason", "NodeList", "RestartCnt", "StartTime", "EndTime", "TimeLimit", "EligibleTime",
    "PreemptTime", "BatchHost", "exit_code", "Partition", "SubmitTime",
)  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{column}:{SEPARATOR}" for column in _COLUMNS)
"""Value of the option -O of squeue. Each column is printed in full, because no width is given, and ends with
SEPARATOR."""

_FROM_SCONTROL = {"JobArrayID": "JobId", "State": "JobState", "RestartCnt": "Restarts", "exit_code": "ExitCode"}
"""squeue's name of a field -> scontrol's name, for the fields whose names differ."""
_WHOLE_NODES = ("NO", "TOPO")
"""Values of the field OverSubscribe of a job that has its nodes to itself."""
_REQUIRED = ("JobArrayID", "State", "Reason", "NodeList", "Partition")


def parse_scontrol_job(text: str) -> list[JobInfo]:
    """Return the jobs in the output of `scontrol show job -o`.

    Raises:
        CommandError: a line lacks a field that every version prints, or its list of nodes cannot be read.
    """
    jobs = []
    for record in records(text, "JobId"):
        for column in _REQUIRED:
            required(record, _FROM_SCONTROL.get(column, column))
        values = {column: record.get(_FROM_SCONTROL.get(column, column), "") for column in _COLUMNS}
        job = job_of_columns(values | {"JobArrayID": _array_id(record)})
        shares = record["OverSubscribe"] not in _WHOLE_NODES if "OverSubscribe" in record else None
        jobs.append(replace(job, shares_nodes=shares))
    return jobs


def _array_id(record: Mapping[str, str]) -> str:
    """Return the id of the job of a line of scontrol, as squeue shows it. A task of a job array also has a JobId like
    other jobs, and the one of an array's last task is also the array's id."""
    array, task = record.get("ArrayJobId"), record.get("ArrayTaskId")
    if not array or not task:
        return record["JobId"]
    return f"{array}_{task}" if parse_unsigned(task) is not None else f"{array}_[{task}]"


def parse_squeue(text: str) -> list[JobInfo]:
    """Return the jobs in the output of `squeue -h -O SQUEUE_FORMAT`.

    Raises:
        CommandError: a line does not have the requested fields, or its list of nodes cannot be read.
    """
    return [job_of_columns(values) for values in split_columns(text, _COLUMNS, "squeue")]


def parse_state(text: str) -> JobState:
    """Return the job state in a text that Slurm prints, such as 'CANCELLED by 1000' or 'COMPLETING+'; UNKNOWN for any
    other text."""
    word = text.split()[0].split("+")[0] if text.split() else ""
    return _STATES.get(word, "UNKNOWN")


def pending_job_text(info: JobInfo, now: float | None = None) -> str:
    """Return why the job waits, in plain language.

    Args:
        now: seconds since 1970; with it the text gives the time until the earliest start, with None the moment of the
            earliest start.
    """
    if info.reason == "BeginTime" and info.begin_s is not None:
        again = "it was put back into the queue and pauses; " if info.restarts else ""
        return f"{again}it may start {_when(info.begin_s, now)} (BeginTime)"
    return pending_reason_text(info.reason, info.job_id)


def needs_action(info: JobInfo) -> bool:
    """Return whether the job waits until a person acts, because it is held or its request can never be met."""
    return info.is_waiting and is_stuck(info.reason)


def _when(moment: float, now: float | None) -> str:
    if now is None:
        return f"from {utc_text(moment)} on"
    return f"in {format_seconds(moment - now)}" if moment > now else "in the scheduler's next round"


def job_of_columns(columns: Mapping[str, str]) -> JobInfo:
    """Return the job that a row of squeue describes.

    Args:
        columns: {squeue's name of a column: value}; a missing column counts as no value.

    Raises:
        CommandError: the list of nodes cannot be read.
    """
    values = defaultdict(str, columns)
    state = parse_state(values["State"])
    return JobInfo(
        job_id=values["JobArrayID"],
        state=state,
        # For the blanks of a sentence, squeue prints blanks and scontrol '_'.
        reason=(text_or_none(values["Reason"]) or "").replace(" ", "_"),
        nodes=node_names(values["NodeList"]),
        restarts=number(values["RestartCnt"]) or 0,
        start_s=read_moment(values["StartTime"]),
        end_s=read_moment(values["EndTime"]),
        time_limit_s=read_duration(values["TimeLimit"]),
        begin_s=read_moment(values["EligibleTime"]),
        preempt_s=read_moment(values["PreemptTime"]),
        batch_host=text_or_none(values["BatchHost"]),
        exit_code=_exit_code(values["exit_code"]) if state in _ENDED else None,
        partition=values["Partition"],
        submit_s=read_moment(values["SubmitTime"]),
    )


def _exit_code(text: str) -> int | None:
    """Return the exit code in Slurm's text: '3:0' -> 3. squeue 22.05 prints the status of wait(2) instead: '768' -> 3.
    None if the text has no number."""
    first, colon, _ = text.partition(":")
    code = parse_unsigned(first)
    return code if colon or code is None else code >> 8


_SACCT_COLUMNS = {
    "JobID": "JobArrayID", "State": "State", "ExitCode": "exit_code", "NodeList": "NodeList", "Submit": "SubmitTime",
    "Start": "StartTime", "End": "EndTime", "Timelimit": "TimeLimit", "Partition": "Partition", "Reason": "Reason",
}  # fmt: skip
"""sacct's name of a field -> squeue's name of the same field."""


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """Return the argv of sacct for the jobs in `ids`; its answer has one line for each time that a job was queued.

    Every option is explicit, because a person's SACCT_FORMAT or the site's defaults would otherwise change the answer.
    """
    return [
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
        f"--format={','.join(_SACCT_COLUMNS)}", f"--jobs={','.join(ids)}",
    ]  # fmt: skip


def parse_sacct(text: str) -> dict[str, JobInfo]:
    """Return the ended jobs in sacct's answer, by id; for a requeued job, the line of its last time in the queue.

    Jobs that accounting shows as running or waiting are left out. hpctrain looks up in accounting only jobs that the
    controller no longer knows. So a job that accounting shows as running or waiting has ended, and accounting has no
    record of its end.

    Raises:
        CommandError: a line does not have the requested fields, or its list of nodes cannot be read.
    """
    times: dict[str, list[JobInfo]] = {}
    for values in split_columns(text, list(_SACCT_COLUMNS.values()), "sacct"):
        times.setdefault(values["JobArrayID"], []).append(job_of_columns(values))
    newest = {job_id: max(jobs, key=lambda job: job.submit_s or 0.0) for job_id, jobs in times.items()}
    return {job_id: replace(job, restarts=len(times[job_id]) - 1) for job_id, job in newest.items() if job.is_ended}
