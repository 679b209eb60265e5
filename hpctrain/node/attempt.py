"""`python -m hpctrain.node begin|end`: what the job script calls before and after the job steps, on the batch node.

`begin` opens an attempt and prints its number, or nothing if the run is over. `end` closes the attempt and decides how
the run goes on. Both read the state on which `jobs.policy` decides from the run folder and from Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.agent.event_log import EventLog
from hpctrain.base.atomic import storage_errors
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_RESUMABLE, CommandError, HpctrainError
from hpctrain.base.process import SystemRunner
from hpctrain.jobs.attempt_outcome import AttemptOutcome, srun_log
from hpctrain.jobs.bad_nodes import record_bad_nodes
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.jobs.policy import AttemptState, JobVerdict, classify, decide_after_attempt, decide_before_start
from hpctrain.jobs.successors import (
    cancel_successors,
    check_own_folder,
    ensure_queued,
    is_cancelled,
    requeue_excluding_bad_nodes,
    submit_next,
    waiting_successors,
)
from hpctrain.launch.preflight.checks import drop_stale_topology, local_driver_version
from hpctrain.node.exit_markers import EXIT_MARKERS_FOLDER
from hpctrain.node.job_state import job_info, read_attempt_state, read_run_state, shares_nodes
from hpctrain.node.run import FINISHED_FILE
from hpctrain.records.history.ledger import (
    read_successors,
)
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.run.run import NotifyState, Run, run_of
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.locate import job_id, job_of_process, record_job
from hpctrain.runs.notify import send_notification
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm

CONTROLLER_WAIT_S = 60.0
"""Seconds for which Slurm's controller is asked again if it cannot be reached; the save notice comes early enough for
such a wait.
"""
RETRY_S = 2.0
JOB_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that name the devices Slurm gave to this job; the next job gets others."""


def begin(argv: list[str]) -> int:
    """Open a new attempt in the run folder and print its number; print nothing if the run is over. Return the exit
    code.

    Raises:
        RefusedError: the run goes on as another job, or Slurm's controller does not answer.
        InputError: the run folder belongs to another user, others can write to it, or a file in it has errors.
        CommandError: Slurm does not say whether the run's newest job has ended.
        StorageError: the run folder cannot be written.
        OSError: topology.json cannot be renamed.
    """
    options = _parse("begin", argv)
    folder, job = RunFolder(options.folder), job_of_process(os.environ)
    # The check comes before the step: each of its tasks unpickles submitit's file in the folder.
    check_trusted(folder.path)
    slurm = Slurm(SystemRunner(), environment_of(os.getppid()))
    check_own_folder(folder.path, job, slurm)
    run, now = run_of(folder.path), SystemClock().wall()
    for line in folder.open_attempts():
        _close_unfinished(folder, run, line["attempt"], line.get("job_id"), slurm)
    over = decide_before_start(read_run_state(folder, run, job, slurm))
    if over is not None:
        return _end_unneeded_job(folder, slurm, over)
    if job is not None and job != job_id(folder.path):
        record_job(folder.path, job)
        _refresh_dependent_runs(folder, slurm)
    nodes = [str(name) for name in NodeSet(os.environ.get("SLURM_JOB_NODELIST", ""))]
    (folder.path / FINISHED_FILE).unlink(missing_ok=True)
    shared = shares_nodes(job, slurm)
    number = folder.begin_attempt(nodes, now, job, int(os.environ.get("SLURM_RESTART_COUNT", "0")), shared)
    for path in (srun_log(folder.path, number).parent, folder.path / EXIT_MARKERS_FOLDER):
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    drivers = local_driver_version(os.environ.get("SLURMD_NODENAME"))
    for words in drop_stale_topology(folder, nodes, now, drivers, shared, run.cluster.devices_per_node):
        _say(words)
    if options.again == "new_job":
        _ensure_queued(folder, run, slurm, now)
    _notify(folder, number, "started", f"attempt {number} on {len(nodes)} nodes")
    print(number)
    return 0


def end(argv: list[str]) -> int:
    """Close the attempt, decide how the run goes on and carry that out; return the exit code of the job. Errors are
    those of `end_attempt`."""
    options = _parse("end", argv)
    return end_attempt(options.folder, options.attempt, options.code, options.again)[0]


def end_attempt(path: Path, number: int, code: int, again: str | None) -> tuple[int, bool]:
    """Close attempt `number` of the run in the folder `path`, decide how the run goes on and carry that out.

    Args:
        code: highest exit code of the attempt's sruns.
        again: how the run goes on after the job: new_job, or same_job (a requeue). None in an allocation that a person
            has.

    Returns:
        The exit code of the job, and whether this job was put back into the queue.

    Raises:
        FileError, UntrustedError: a file of the run has errors; or it or the run folder is untrusted.
        StorageError: the run folder cannot be written.
    """
    folder = RunFolder(path)
    run, events = run_of(folder.path), read_events(folder.path / "events.jsonl", number)
    state = read_attempt_state(folder, run, number, code, events)
    ended, requeued = _EndedAttempt(folder, number, state.outcome, events), False
    if again is None:
        ended.record(decide_after_attempt(replace(state, in_allocation=True)))
    else:
        with _reported("{}"):  # the run goes on without its ledger of bad nodes
            record_bad_nodes(folder.path, number, events, SystemClock().wall(), run.recovery.exclude_hours)
        slurm = Slurm(SystemRunner(), environment_of(os.getppid()))
        requeued = _continue_run(ended, run, state, slurm, again == "same_job")
    return (code if state.outcome.code is None else state.outcome.code), requeued


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process began, without the variables that name its job's devices.

    For the job script that is the environment before the lines of cluster.setup. The next job is queued with it, so
    that search paths, to which these lines add folders, do not grow from job to job. If the environment of the process
    cannot be read, this process's own environment is returned.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs if name not in JOB_DEVICE_VARIABLES}


@dataclass(frozen=True)
class _EndedAttempt:
    """An attempt that has ended, and the states that notifications have reported about it."""

    folder: RunFolder
    number: int
    """Number of the attempt."""
    outcome: AttemptOutcome
    """How the attempt ended."""
    events: Sequence[Event]
    """Events of the attempt."""
    reported: list[NotifyState] = field(default_factory=list)

    def record(self, verdict: JobVerdict) -> None:
        """Complete the attempt's line in attempts.jsonl by the verdict, and print, log and notify the verdict once."""
        reason, now = verdict.reason, SystemClock().wall()
        self.folder.end_attempt(self.number, now, reason, self.outcome.code, verdict.exit_class, self.events)
        if verdict.notify_state in self.reported:
            return  # while the controller is away, verdicts repeat
        self.reported.append(verdict.notify_state)
        _say(f"attempt {self.number} ended ({verdict.exit_class}): {reason}")
        event_log = _event_log(self.folder, self.number)
        if verdict.cause == "time_limit":
            event_log.write("time_limit", -1, reason)
        if verdict.failed:
            event_log.write("failed", -1, reason, **({"cancelled": True} if verdict.cancelled else {}))
        _notify(self.folder, self.number, verdict.notify_state, reason)


def _this_job() -> str:
    job = job_of_process(os.environ)
    assert job is not None, "the job script runs in a job"
    return job


def _continue_run(ended: _EndedAttempt, run: Run, state: AttemptState, slurm: Slurm, same_job: bool) -> bool:
    """Decide how the run goes on after its batch job, record the verdict and carry it out. Return whether this job was
    put back into the queue.

    Args:
        same_job: whether to requeue this job instead of queueing a new one.
    """
    folder, job = ended.folder, _this_job()
    state = replace(state, successor=_first_successor(folder, job, slurm))
    verdict = _decide_and_requeue(ended, run, state, slurm, same_job)
    if verdict.act == "stop":
        _cancel_successors(folder, slurm)
    elif verdict.act == "wait" and state.successor is not None and job == job_id(folder.path):
        _promote_successor(folder, run, job, slurm)
    return verdict.act == "again" and job == job_id(folder.path)


def _decide_and_requeue(
    ended: _EndedAttempt, run: Run, state: AttemptState, slurm: Slurm, same_job: bool
) -> JobVerdict:
    """Decide how the run goes on, record the verdict, queue the run again if the verdict is `again`, and return it.

    An unreachable controller is asked again for CONTROLLER_WAIT_S, because nothing else would queue the run again. The
    verdict is recorded before the run is queued again, because a requeue ends this process.

    Args:
        same_job: whether to requeue this job instead of queueing a new one.
    """
    job, clock = _this_job(), SystemClock()
    deadline = clock.now() + CONTROLLER_WAIT_S
    asked: JobVerdict | None = None
    while state.outcome.exit_class != "done":
        try:
            info = slurm.job(job)
            if asked is not None and info is not None and info.is_waiting:
                return asked  # the controller took the last call before it stopped answering
            cancelled = is_cancelled(ended.folder.path)
            verdict = decide_after_attempt(replace(state, job=info, now=clock.wall(), cancelled=cancelled))
            ended.record(verdict)
            if verdict.act == "again":
                asked = verdict
                _queue_again(ended.folder, run, job, slurm, same_job)
            return verdict
        except CommandError as error:
            if not isinstance(error, ControllerUnreachableError) or clock.now() >= deadline:
                state = replace(state, slurm_error=str(error))
                break
        clock.sleep(RETRY_S)
    verdict = decide_after_attempt(state)
    ended.record(verdict)
    return verdict


def _queue_again(folder: RunFolder, run: Run, job: str, slurm: Slurm, same_job: bool) -> None:
    """Requeue this job, or queue the run's next job; if sbatch refuses the next job, requeue this one.

    Args:
        same_job: whether to requeue this job instead of queueing a new one.

    Raises:
        CommandError: Slurm refused, or the controller does not answer.
        UntrustedError: the run folder or its list of job ids is untrusted.
    """
    if job != job_id(folder.path):
        return  # another node was slow to end the attempt of a lost script, and had queued it
    now = SystemClock().wall()
    if same_job:
        requeue_excluding_bad_nodes(folder.path, run, job, slurm, now)
        return
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
    # Slurm from 24.11 on requeues a preempted job that ends within its grace time, and the next job would wait for its
    # second end. A site that forbids the change makes the run slower, not wrong.
    with _reported("if Slurm requeues this job, the next one waits for it ({})"):
        slurm.update(job, Requeue=0)
    _refresh_dependent_runs(folder, slurm)
    if is_cancelled(folder.path):
        # The cancel command did not see that job.
        slurm.cancel(following)


def _promote_successor(folder: RunFolder, run: Run, job: str, slurm: Slurm) -> None:
    """Make the waiting successor the run's newest job, because Slurm ended this job. An error is only printed."""
    with _reported("{}"):
        info = slurm.job(job)
        if info is not None and not info.is_waiting:
            submit_next(folder.path, run, slurm, SystemClock().wall())
            _refresh_dependent_runs(folder, slurm)


def _first_successor(folder: RunFolder, job: str, slurm: Slurm) -> str | None:
    """Return the id of the run's first successor that has not ended; if the controller does not answer, of the
    successor that is queued behind the job `job` according to successors.jsonl. None without a successor.
    """
    try:
        waiting = waiting_successors(folder.path, slurm)
    except CommandError:
        waiting = [item.job_id for item in read_successors(folder.path) if item.after == job]
    return waiting[0] if waiting else None


def _close_unfinished(folder: RunFolder, run: Run, number: int, job: str | None, slurm: Slurm) -> None:
    """Complete the line of attempt `number`, whose job script was killed, from its events and from what Slurm knows of
    its job `job`.

    Raises:
        StorageError: the run folder cannot be written.
        FileError, UntrustedError: a file of the run has errors; or it or the run folder is untrusted.
    """
    events, now = read_events(folder.path / "events.jsonl", number), SystemClock().wall()
    state = read_attempt_state(folder, run, number, None, events)
    known = classify(replace(state, job=job_info(job, slurm)))
    # The job that begins here was requeued, by a person or for a lost node; Slurm only knows that it runs.
    requeued = job is not None and job == job_of_process(os.environ)
    reason = f"its job was put back into the queue: {known.reason}" if requeued else known.reason
    folder.end_attempt(number, now, reason, state.outcome.code, known.exit_class, events)
    if known.cause == "time_limit":
        _event_log(folder, number).write("time_limit", -1, reason)
    with contextlib.suppress(HpctrainError):  # a run goes on without its ledger of bad nodes
        record_bad_nodes(folder.path, number, events, now, run.recovery.exclude_hours)


def _ensure_queued(folder: RunFolder, run: Run, slurm: Slurm, now: float) -> None:
    """Queue the missing successors. An error is only printed, so that the attempt begins anyway."""
    before = len(read_successors(folder.path))
    with _reported("recovery.successors: not all are queued ({})"):
        ensure_queued(folder.path, run, slurm, now)
    if len(read_successors(folder.path)) > before:
        _refresh_dependent_runs(folder, slurm)


def _end_unneeded_job(folder: RunFolder, slurm: Slurm, over: JobVerdict) -> int:
    """Cancel the successors of a job that begins although its run is over, and return the job's exit code.

    The code is 0 only if the run is done, because other jobs may depend on the success of this job.
    """
    _say(over.reason)
    _cancel_successors(folder, slurm)
    if not over.failed:
        return 0 if over.exit_class == "done" else EXIT_RESUMABLE
    _event_log(folder, max(0, len(folder.attempts()) - 1)).write("failed", -1, over.reason)
    return EXIT_REFUSED if over.refused else EXIT_FAILED


def _cancel_successors(folder: RunFolder, slurm: Slurm) -> None:
    with _reported("not cancelled: the jobs queued behind this one ({}); each ends at once when it starts"):
        cancel_successors(folder.path, slurm, job_of_process(os.environ))


def _refresh_dependent_runs(folder: RunFolder, slurm: Slurm) -> None:
    """Make the jobs of other runs that wait for this run wait for this run's current jobs; print what was done."""
    for line in refresh_dependent_runs(folder.path, slurm, os.environ):
        _say(line)


@contextlib.contextmanager
def _reported(text: str) -> Iterator[None]:
    """Print an error of hpctrain in the `with` block, in place of the {} in `text`, and go on after the block."""
    try:
        yield
    except HpctrainError as error:
        _say(text.format(error))


def _event_log(folder: RunFolder, attempt: int) -> EventLog:
    return EventLog(folder.path / "events.jsonl", os.environ.get("SLURMD_NODENAME", "batch"), attempt, SystemClock())


def _notify(folder: RunFolder, attempt: int, state: NotifyState, reason: str) -> None:
    send_notification(folder.path, attempt, state, reason, SystemClock(), os.environ)


def _say(text: str) -> None:
    print(f"hpctrain node: {text}", file=sys.stderr, flush=True)


def _parse(verb: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"hpctrain.node {verb}")
    parser.add_argument("--folder", type=Path, required=True)
    if verb == "end":
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--code", type=int, required=True)
    text = "how the run goes on after the job; left out in an allocation that a person has"
    parser.add_argument("--again", choices=["new_job", "same_job"], help=text)
    return parser.parse_args(argv)
