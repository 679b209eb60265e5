"""`python -m hpctrain.node begin|end`: what the job script does before and after the step, on the batch node.

`begin` prints the attempt's number, or nothing when there is nothing to do. `end` decides how the run goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.agent.event_log import EventLog
from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_RESUMABLE, CommandError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.jobs.after_attempt import (
    AttemptHistory,
    JobVerdict,
    decide_and_requeue,
    notification_state,
    read_attempt_history,
)
from hpctrain.jobs.attempt_outcome import AttemptOutcome, read_outcome
from hpctrain.jobs.bad_nodes import record_bad_nodes
from hpctrain.jobs.cancel import is_cancelled
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.jobs.live_job_check import check_own_folder
from hpctrain.jobs.srun_error import srun_log, with_srun_error
from hpctrain.jobs.stop_cause import stop_reason_text
from hpctrain.jobs.successors import (
    cancel_successors,
    ensure_queued,
    requeue_excluding_bad_nodes,
    submit_next,
    waiting_successors,
)
from hpctrain.launch.preflight.checks import drop_stale_topology
from hpctrain.launch.preflight.gpu_driver import local_driver_version
from hpctrain.node.attempt_recovery import close_unfinished_attempts, verdict_before_start
from hpctrain.node.exit_markers import EXIT_MARKERS_FOLDER
from hpctrain.node.run import FINISHED_FILE
from hpctrain.records.history.event import Event, read_events
from hpctrain.records.history.successor import job_chain, read_successors
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.fault_fields import confirmed_suspects
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id, record_job
from hpctrain.runs.notify import send_notification
from hpctrain.runs.trust import check_trusted
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm

JOB_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that name the devices Slurm gave to this job; the next job gets others."""


def begin(argv: list[str]) -> int:
    """Open a new attempt in the run folder and print its number; print nothing if the run is over.

    Raises:
        RefusedError: the run goes on as another job.
        InputError: others can write to the run folder.
    """
    options = _parse("begin", argv)
    folder, own = RunFolder(options.folder), os.environ.get("SLURM_JOB_ID")
    # The check comes before the step: each of its tasks unpickles submitit's file in the folder.
    check_trusted(folder.path)
    slurm = Slurm(SystemRunner(), environment_of(os.getppid()))
    check_own_folder(folder.path, own, slurm)
    run, now = run_of(folder.path), time.time()
    close_unfinished_attempts(folder, run, slurm, now, _node_name())
    over = verdict_before_start(folder, run, own, slurm)
    if over is not None:
        _say(over.reason)
        return _end_finished_run(folder, slurm, over)
    if own is not None and own != job_id(folder.path):
        record_job(folder.path, own)
        _refresh_dependent_runs(folder, slurm)
    nodes = [str(name) for name in NodeSet(os.environ.get("SLURM_JOB_NODELIST", ""))]
    (folder.path / FINISHED_FILE).unlink(missing_ok=True)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    number = folder.begin_attempt(nodes, now, own, restarts)
    for path in (srun_log(folder.path, number).parent, folder.path / EXIT_MARKERS_FOLDER):
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    for words in drop_stale_topology(folder, nodes, now, local_driver_version(os.environ.get("SLURMD_NODENAME"))):
        _say(words)
    if options.again == "new_job":
        _ensure_queued(folder, run, slurm, now)
    send_notification(
        folder.path,
        number,
        "started",
        f"attempt {number} on {len(nodes)} nodes",
        _node_name(),
        SystemClock(),
        os.environ,
    )
    print(number)
    return 0


def _ensure_queued(folder: RunFolder, run: Run, slurm: Slurm, now: float) -> None:
    """Queue the missing successors. The attempt begins even where this fails."""
    before = len(read_successors(folder.path))
    try:
        ensure_queued(folder.path, run, slurm, now)
    except HpctrainError as error:
        _say(f"recovery.successors: not all are queued ({error})")
    if len(read_successors(folder.path)) > before:
        _refresh_dependent_runs(folder, slurm)


def end(argv: list[str]) -> int:
    """Close the attempt and decide what comes next; return the exit code of the job."""
    options = _parse("end", argv)
    folder = RunFolder(options.folder)
    run, now = run_of(folder.path), time.time()
    events = [event for event in read_events(folder.path / "events.jsonl") if event.attempt == options.attempt]
    outcome = read_outcome(options.code, events, (folder.path / FINISHED_FILE).exists())
    outcome = with_srun_error(outcome, folder.path, options.attempt, folder.attempts()[options.attempt]["nodes"])
    event_log = EventLog(folder.path / "events.jsonl", _node_name(), options.attempt, SystemClock())
    reported_states: list[str] = []

    def record_verdict(verdict: JobVerdict) -> None:
        reason = outcome.reason if verdict.act == "wait" and outcome.reason else verdict.reason
        folder.end_attempt(options.attempt, time.time(), reason, outcome.code, verdict.exit_class, events)
        state = notification_state(verdict)
        if state not in reported_states:  # while the controller is away, verdicts repeat: report each once
            reported_states.append(state)
            _say(f"attempt {options.attempt} ended ({verdict.exit_class}): {reason}")
            if verdict.cause == "time_limit":
                event_log.write("time_limit", -1, reason)
            send_notification(folder.path, options.attempt, state, reason, _node_name(), SystemClock(), os.environ)

    if options.again is None:
        verdict = _decide_in_allocation(outcome)
        record_verdict(verdict)
    else:
        verdict = _decide_and_requeue(folder, run, options, outcome, events, now, record_verdict)
    if verdict.failed:
        # In a person's allocation, a run that saved and left has not failed: nothing was to queue it again.
        event_log.write("failed", -1, verdict.reason, **({"cancelled": True} if options.again is None else {}))
    return options.code if outcome.code is None else outcome.code


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process began with; the job script's is from before cluster.setup changed it.

    A job that is queued from here starts with the environment of the first submission. Else module paths would grow.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs if name not in JOB_DEVICE_VARIABLES}


def _decide_and_requeue(
    folder: RunFolder, run: Run, options: argparse.Namespace, outcome: AttemptOutcome, events: list[Event], now: float,
    record_verdict: Callable[[JobVerdict], None],
) -> JobVerdict:  # fmt: skip
    """Return the verdict on a job that was submitted for this run, and carry it out."""
    job, slurm = os.environ["SLURM_JOB_ID"], Slurm(SystemRunner(), environment_of(os.getppid()))
    _record_bad_nodes(folder, run, options.attempt, events, now)
    history = _attempt_history(folder, run, options.attempt, events, job, slurm)

    def again() -> None:
        if options.again == "same_job":
            requeue_excluding_bad_nodes(folder.path, run, job, slurm, now)
        else:
            _submit_next_job(folder, run, job, slurm, now)

    verdict = decide_and_requeue(
        outcome, job, history, slurm, SystemClock(), lambda: is_cancelled(folder.path), record_verdict, again
    )
    if verdict.failed:
        verdict = replace(verdict, reason=f"{verdict.reason}; go on with `hpctrain resubmit {folder.path.name}`")
    record_verdict(verdict)
    if verdict.act == "stop":
        _cancel_successors(folder, slurm)
    elif verdict.act == "wait" and history.successor is not None and job == job_id(folder.path):
        _promote_successor(folder, run, job, slurm, now)
    return verdict


def _submit_next_job(folder: RunFolder, run: Run, job: str, slurm: Slurm, now: float) -> None:
    """Queue the run's next job. If sbatch refuses it, requeue this job.

    Raises:
        CommandError: neither was possible.
    """
    try:
        following = submit_next(folder.path, run, slurm, now)
    except ControllerUnreachableError:
        raise
    except HpctrainError as error:
        if run.recovery.successors:
            raise CommandError(str(error)) from error  # a job with successors may not be requeued
        _say(f"no new job could be queued ({error}); this one goes back to the queue")
        requeue_excluding_bad_nodes(folder.path, run, job, slurm, now)
        return
    _say(f"the run goes on as job {following}")
    _disable_requeue(job, slurm)
    _refresh_dependent_runs(folder, slurm)
    if is_cancelled(folder.path):
        # The cancel command did not see that job.
        slurm.cancel(following)


def _disable_requeue(job: str, slurm: Slurm) -> None:
    """Switch off Slurm's own requeue of this job.

    Slurm from 24.11 on requeues a preempted job that ends within its grace time, and the next job would wait for its
    second end. A site that forbids the change makes the run slower, not wrong.
    """
    try:
        slurm.update(job, Requeue=0)
    except HpctrainError as error:
        _say(f"if Slurm requeues this job, the next one waits for it ({error})")


def _promote_successor(folder: RunFolder, run: Run, job: str, slurm: Slurm, now: float) -> None:
    """Make the waiting successor the run's job, as Slurm ended this one. A failure is printed."""
    try:
        info = slurm.job(job)
        if info is not None and not info.state.is_waiting:
            submit_next(folder.path, run, slurm, now)
            _refresh_dependent_runs(folder, slurm)
    except HpctrainError as error:
        _say(str(error))


def _refresh_dependent_runs(folder: RunFolder, slurm: Slurm) -> None:
    """Make the runs that wait for this one wait for its current job."""
    for line in refresh_dependent_runs(folder.path, slurm, os.environ):
        _say(line)


def _attempt_history(
    folder: RunFolder, run: Run, attempt: int, events: list[Event], job: str, slurm: Slurm
) -> AttemptHistory:
    attempts = folder.attempts()
    chain = job_chain(job, read_successors(folder.path))
    lines = [line for line in attempts[:attempt] if line.get("job_id") in chain]
    checkpoint_before, newest = attempts[attempt].get("checkpoint_before"), folder.newest_checkpoint()
    try:
        waiting = waiting_successors(folder.path, slurm)
    except CommandError:
        waiting = [item.job_id for item in read_successors(folder.path) if item.after == job]
    successor = waiting[0] if waiting else None
    bad = confirmed_suspects(events, attempts[:attempt])
    return read_attempt_history(
        lines, checkpoint_before, newest, run.recovery.retries, successor, run.cluster.save_notice_s, bad
    )


def _record_bad_nodes(folder: RunFolder, run: Run, attempt: int, events: list[Event], now: float) -> None:
    """Add the nodes to blame to the run's ledger. The run goes on even where this fails."""
    try:
        record_bad_nodes(folder.path, attempt, events, now, run.recovery.exclude_hours)
    except HpctrainError as error:
        _say(str(error))


def _end_finished_run(folder: RunFolder, slurm: Slurm, over: JobVerdict) -> int:
    """End a job that begins although its run is over, cancel its successors, and return its exit code.

    It is 0 only if the run is done: other jobs may depend on its success.
    """
    _cancel_successors(folder, slurm)
    if not over.failed:
        return 0 if over.exit_class == "done" else EXIT_RESUMABLE
    attempt = max(0, len(folder.attempts()) - 1)
    event_log = EventLog(
        folder.path / "events.jsonl", os.environ.get("SLURMD_NODENAME", "batch"), attempt, SystemClock()
    )
    event_log.write("failed", -1, over.reason)
    return 1


def _cancel_successors(folder: RunFolder, slurm: Slurm) -> None:
    try:
        cancel_successors(folder.path, slurm, os.environ.get("SLURM_JOB_ID"))
    except HpctrainError as error:
        _say(f"not cancelled: the jobs queued behind this one ({error}); each ends at once when it starts")


def _decide_in_allocation(outcome: AttemptOutcome) -> JobVerdict:
    """Return the verdict on a run in a person's allocation, which hpctrain does not queue again."""
    if outcome.exit_class not in ("resumable", "infrastructure"):
        return JobVerdict("stop", stop_reason_text(outcome, None), outcome.exit_class)
    reason = "stopped on request, saved" if outcome.saved else stop_reason_text(outcome, None)
    words = f"{reason}; `hpctrain resubmit` goes on with it"
    return JobVerdict("stop", words, outcome.exit_class, failed=True, cancelled=True)


def _say(text: str) -> None:
    print(f"hpctrain node: {text}", file=sys.stderr, flush=True)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME", "batch")


def _parse(verb: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"hpctrain.node {verb}")
    parser.add_argument("--folder", type=Path, required=True)
    if verb == "end":
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--code", type=int, required=True)
    text = "how the run goes on after the job; left out in an allocation that a person has"
    parser.add_argument("--again", choices=["new_job", "same_job"], help=text)
    return parser.parse_args(argv)
