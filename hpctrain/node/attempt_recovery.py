"""Recovery when a job begins: earlier attempts that nobody closed, and reasons not to start another one."""

from __future__ import annotations

import contextlib
import os

from hpctrain.agent.event_log import EventLog
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.jobs.attempt_outcome import is_preempted, read_outcome, with_no_progress_check, with_slurm_state
from hpctrain.jobs.bad_nodes import record_bad_nodes
from hpctrain.jobs.cancel import is_cancelled
from hpctrain.jobs.policy import JobVerdict
from hpctrain.jobs.srun_error import with_srun_error
from hpctrain.jobs.stop_cause import stop_cause, stop_reason_text
from hpctrain.node.run import FINISHED_FILE
from hpctrain.records.history.attempt import attempts_without_checkpoint, failures_since_checkpoint
from hpctrain.records.history.event import read_events
from hpctrain.records.history.successor import job_chain, read_successors
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo, JobState

SILENT = "ended without a word: node lost, killed, or time limit"


def close_unfinished_attempts(folder: RunFolder, run: Run, slurm: Slurm, now: float, me: str = "batch") -> None:
    """Complete the lines of attempts whose script was killed, from their events, else from what Slurm knows.

    Args:
        me: name of this node, for events.

    Raises:
        StorageError: the run folder cannot be written.
    """
    for line in folder.open_attempts():
        number, job = line["attempt"], line.get("job_id")
        events = [event for event in read_events(folder.path / "events.jsonl") if event.attempt == number]
        info = _slurm_job_info(job, slurm)
        outcome = read_outcome(None, events, (folder.path / FINISHED_FILE).exists())
        outcome = with_slurm_state(with_srun_error(outcome, folder.path, number, line["nodes"]), info)
        cause = stop_cause(outcome, info, 0.0, run.cluster.save_notice_s)
        reason = stop_reason_text(outcome, cause) if cause is not None or outcome.reason is not None else SILENT
        if job is not None and job == os.environ.get("SLURM_JOB_ID"):
            # A person requeued the job, or Slurm did for a lost node. Of the job that begins here Slurm only knows that
            # it runs.
            reason = f"its job was put back into the queue: {reason}"
        chain = job_chain(job, read_successors(folder.path)) if job is not None else []
        before = [known for known in folder.attempts()[:number] if known.get("job_id") in chain]
        progressed = folder.newest_checkpoint() != line.get("checkpoint_before")
        preempted = info is not None and is_preempted(info)
        outcome = with_no_progress_check(
            outcome, progressed, preempted, 0 if progressed else attempts_without_checkpoint(before)
        )
        folder.end_attempt(number, now, reason, outcome.code, outcome.exit_class, events)
        if cause == "time_limit":
            EventLog(folder.path / "events.jsonl", me, number, SystemClock()).write("time_limit", -1, reason)
        # A run goes on without its ledger of bad nodes.
        with contextlib.suppress(HpctrainError):
            record_bad_nodes(folder.path, number, events, now, run.recovery.exclude_hours)


def verdict_before_start(folder: RunFolder, run: Run, own: str | None, slurm: Slurm) -> JobVerdict | None:
    """Return why the job that begins here has nothing to do; None if the run goes on.

    Args:
        own: id of the job that begins.
    """
    attempts, name = folder.attempts(), folder.path.name
    resubmit = f"`hpctrain resubmit {name}` goes on with it"
    if (folder.path / FINISHED_FILE).exists() or (attempts and attempts[-1].get("class") == "done"):
        return JobVerdict("stop", f"{name}: the run is finished", "done")
    if is_cancelled(folder.path):
        return JobVerdict("stop", f"{name}: the run was cancelled; {resubmit}", "resumable")
    successors = read_successors(folder.path)
    before = job_id(folder.path)
    if own in {item.job_id for item in successors} and own != before:
        info = _slurm_job_info(before, slurm)
        if info is not None and info.state is JobState.CANCELLED and not is_preempted(info):
            return JobVerdict("stop", f"{name}: its job {before} was cancelled; {resubmit}", "resumable")
    chain = job_chain(own, successors) if own is not None else []
    count = failures_since_checkpoint([line for line in attempts if line.get("job_id") in chain])
    if count > run.recovery.retries:
        text = f"{attempts[-1]['reason']}; {count} failures without a new checkpoint (recovery.retries is "
        return JobVerdict("stop", f"{text}{run.recovery.retries}); {resubmit}", "fatal", True)
    lost = lost_checkpoints_text(folder.path)
    if lost is not None:
        return JobVerdict("stop", f"{name}: {lost}", "fatal", True)
    return None


def _slurm_job_info(job: str | None, slurm: Slurm) -> JobInfo | None:
    """Return what Slurm, or else its accounting, knows of an earlier job of the run.

    None for this very job, of which Slurm only knows that it runs.
    """
    if job is None or job == os.environ.get("SLURM_JOB_ID"):
        return None
    try:
        found = slurm.job(job)
    except CommandError:
        return None
    return found or slurm.ended_jobs([job]).get(job)
