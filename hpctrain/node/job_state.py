"""Reads the state on which `jobs.policy` decides, from the run folder and from Slurm."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpctrain.base.errors import CommandError
from hpctrain.jobs.attempt_outcome import is_preempted, read_outcome, with_srun_error
from hpctrain.jobs.policy import AttemptState, RunState
from hpctrain.jobs.successors import (
    is_cancelled,
)
from hpctrain.node.run import FINISHED_FILE
from hpctrain.records.history.ledger import (
    attempts_without_checkpoint,
    failures_since_checkpoint,
    is_new_checkpoint,
    job_chain,
    read_successors,
)
from hpctrain.records.history.run_log import Event
from hpctrain.records.run.run import Run
from hpctrain.runs.fault_fields import confirmed_suspects
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id, job_of_process
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo


def read_attempt_state(
    folder: RunFolder, run: Run, attempt: int, code: int | None, events: Sequence[Event]
) -> AttemptState:
    """Return the state of an ended attempt as far as the run folder shows it; fields that need Slurm have defaults.

    Args:
        code: highest exit code of the attempt's sruns; None for an attempt whose script was killed.
        events: events of the attempt.

    Raises:
        FileError, UntrustedError: attempts.jsonl or successors.jsonl has errors or is untrusted.
    """
    *before, line = folder.attempts()[: attempt + 1]
    outcome = read_outcome(code, events, (folder.path / FINISHED_FILE).exists())
    progressed = is_new_checkpoint(line.get("checkpoint_before"), folder.newest_checkpoint())
    chain = job_chain(line.get("job_id"), read_successors(folder.path))
    counted = [] if progressed else [earlier for earlier in before if earlier.get("job_id") in chain]
    return AttemptState(
        run=folder.path.name,
        outcome=with_srun_error(outcome, folder.path, attempt),
        retries=run.recovery.retries,
        notice_s=run.cluster.save_notice_s,
        progressed=progressed,
        failures=failures_since_checkpoint(counted, confirmed_suspects(events, before)),
        attempts_without_checkpoint=attempts_without_checkpoint(counted),
    )


def read_run_state(folder: RunFolder, run: Run, job: str | None, slurm: Slurm) -> RunState:
    """Return the state on which `decide_before_start` decides about a job that begins, from run folder and Slurm.

    Args:
        job: id of the job that begins.

    Raises:
        FileError, UntrustedError: a file of the run has errors or is untrusted.
    """
    attempts, successors, newest = folder.attempts(), read_successors(folder.path), job_id(folder.path)
    is_successor = job in {item.job_id for item in successors} and job != newest
    previous = job_info(newest, slurm) if is_successor else None
    by_hand = previous is not None and previous.state == "CANCELLED" and not is_preempted(previous)
    chain = job_chain(job, successors)
    return RunState(
        run=folder.path.name,
        retries=run.recovery.retries,
        finished=(folder.path / FINISHED_FILE).exists() or (bool(attempts) and attempts[-1].get("class") == "done"),
        cancelled=is_cancelled(folder.path),
        cancelled_job=newest if by_hand else None,
        failures=failures_since_checkpoint([line for line in attempts if line.get("job_id") in chain]),
        last_reason=attempts[-1].get("reason", "") if attempts else "",
        lost_checkpoints=lost_checkpoints_text(folder.path),
    )


def job_info(job: str | None, slurm: Slurm) -> JobInfo | None:
    """Return what Slurm, or else its accounting, knows of an earlier job of the run; None if neither knows the job
    or answers.

    The result is None, too, if `job` is None, or if it is the job of this process, whose end Slurm cannot know yet.
    """
    if job is None or job == job_of_process(os.environ):
        return None
    try:
        return slurm.job(job) or slurm.ended_jobs([job]).get(job)
    except CommandError:
        return None


def shares_nodes(job: str | None, slurm: Slurm) -> bool:
    """Whether other jobs may run on the nodes of this running job, because it has only a part of each. False if `job`
    is None, or if the controller does not answer."""
    try:
        info = slurm.job(job) if job is not None else None
    except CommandError:
        return False
    return info is not None and bool(info.shares_nodes)
