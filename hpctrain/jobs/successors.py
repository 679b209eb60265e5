"""Queues and cancels the jobs of a run: the newest job, and successors, which wait behind the running job and continue
the run without its bad nodes.

A successor starts when the job before has ended in any way, even if no process of hpctrain was left to queue a job. A
successor is queued while the job before it waits or runs, so it is recorded before it can start.

Before a running job is cancelled, its agents get time to save a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path

from hpctrain.base.atomic import append_line, storage_errors, write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError, StorageError
from hpctrain.jobs.bad_nodes import select_excluded_nodes
from hpctrain.jobs.partition_checks import exclude_options, merged_exclude_list, nodes_of_job, sbatch_option_names
from hpctrain.records.history.ledger import SUCCESSORS_FILE, Successor, job_chain, read_bad_nodes, read_successors
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import resume_text
from hpctrain.runs.locate import job_id, open_jobs, record_job
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm


def submit_next(folder: Path, run: Run, slurm: Slurm, now: float) -> str:
    """Record the job that continues the run as the run's newest job, and return its id: a successor that waits already,
    else a job that is queued now.

    Args:
        now: seconds since 1970.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        CommandError: sbatch refused the job.
        FileError, UntrustedError: bad_nodes.jsonl, successors.jsonl or the list of job ids of the run is damaged or
            untrusted; no job was queued.
        StorageError: the run folder cannot be written. No job was queued, or it is queued and in successors.jsonl, and
            only the list of the run's jobs does not have it.
    """
    waiting = waiting_successors(folder, slurm)
    exclude = nodes_to_exclude(folder, run, slurm, now)
    _update_exclusions(folder, run, waiting, exclude, slurm, now)
    following = waiting[0] if waiting else queue_behind(folder, run, _newest_job(folder), exclude, slurm, now)
    record_job(folder, following)
    return following


def ensure_queued(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Exclude bad nodes from the successors that wait, then queue successors until `recovery.successors` of them wait;
    return the ids of those queued now. With another value of `recovery.requeue` than new_job nothing is done.

    Args:
        now: seconds since 1970.

    Raises:
        CommandError: the controller does not answer or sbatch refused a job; the jobs before that job are queued.
        FileError, UntrustedError: bad_nodes.jsonl, successors.jsonl or the list of job ids is damaged or untrusted.
        StorageError: the run folder cannot be written.
    """
    if not run.recovery.successors or run.recovery.requeue != "new_job":
        return []
    waiting = waiting_successors(folder, slurm)
    exclude = nodes_to_exclude(folder, run, slurm, now)
    _update_exclusions(folder, run, waiting, exclude, slurm, now)
    chain = [_newest_job(folder), *waiting]
    added: list[str] = []
    while len(chain) <= run.recovery.successors:
        chain.append(queue_behind(folder, run, chain[-1], exclude, slurm, now))
        added.append(chain[-1])
    return added


def queue_successors(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Queue the successors of a run that was just submitted; return a line for a person with their ids or the error.

    If Slurm refuses a successor, no error is raised: the run's job is queued, and queues successors when it starts.

    Args:
        now: seconds since 1970.
    """
    try:
        added = ensure_queued(folder, run, slurm, now)
    except HpctrainError as error:
        return [f"recovery.successors: not all are queued ({error}); the job queues the rest when it starts"]
    return [f"queued behind it: {', '.join(added)}"] if added else []


def waiting_successors(folder: Path, slurm: Slurm) -> list[str]:
    """Return the ids of those successors of the run's newest job that have not ended, in the order in which they would
    run.

    Raises:
        CommandError: the controller does not answer.
        FileError, UntrustedError: successors.jsonl or the list of job ids is damaged or untrusted.
    """
    behind = open_jobs(folder)[1:]
    if not behind:
        return []
    known = slurm.jobs(behind)
    return [job for job in behind if job in known and not known[job].is_ended]


def cancel_successors(folder: Path, slurm: Slurm, asking_job: str | None = None) -> list[str]:
    """Cancel the successors of the run's newest job, the last one first so that none starts, and return their ids.

    Args:
        asking_job: id of the job of this process; it ends by itself and is not cancelled.

    Raises:
        CommandError: the controller does not answer. A successor that starts although the run is over ends at once.
    """
    waiting = [job for job in waiting_successors(folder, slurm) if job != asking_job]
    for job in reversed(waiting):
        slurm.cancel(job)
    return waiting


def nodes_to_exclude(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Return the names of the nodes in the run's bad_nodes.jsonl that the run's next job excludes.

    Raises:
        CommandError: the controller does not answer.
        FileError, UntrustedError: bad_nodes.jsonl is damaged or untrusted.
    """
    bad = [line for line in read_bad_nodes(folder) if line.expires_s > now]
    if not bad:
        return []
    state = slurm.state()
    allowed = nodes_of_job(run, state)
    if allowed is None:
        # A constraint selects nodes by Slurm's own rules: sbatch refuses a job that could never start.
        free: dict[str, object] = {"sbatch": [], "constraint": None, "groups": [], "reservation": None}
        anywhere = run.cluster.model_copy(update=free)
        allowed = nodes_of_job(run.model_copy(update={"cluster": anywhere}), state) or frozenset()
    usable = {node.name for node in state.nodes if node.accepts_jobs and node.name in allowed}
    fraction = run.recovery.exclude_max_fraction
    return select_excluded_nodes(bad, now, allowed, usable, run.cluster.node_range[0], fraction)


def nodes_to_exclude_if_known(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Return the names of the nodes that the run's next job excludes; [] if bad_nodes.jsonl cannot be read or the
    controller does not answer, because neither should stop a submission."""
    try:
        return nodes_to_exclude(folder, run, slurm, now)
    except HpctrainError:
        return []


def queue_behind(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm, now: float) -> str:
    """Submit the run's job.sh once more, as a job that starts when `job` has ended; return the new job's id.

    If a job of the same script already waits for `job` and is not recorded, it is used instead: sbatch answered too
    late, or the process that submitted it was killed.

    Args:
        exclude: names of the nodes that the new job excludes.
        now: seconds since 1970.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        CommandError: sbatch refused the job, also without the excluded nodes.
        FileError, UntrustedError: successors.jsonl is damaged or untrusted; no job was queued.
        StorageError: the run folder cannot be written; the new job was cancelled.
    """
    recorded = {item.job_id for item in read_successors(folder)}
    unrecorded = [queued for queued in slurm.queued_behind(folder / "job.sh", job) if queued not in recorded]
    if unrecorded:
        following, exclude = unrecorded[0], []
    else:
        following, exclude = _submit(folder, run, job, exclude, slurm)
    if "hold" in sbatch_option_names(run):
        slurm.release(following)  # the hold was meant for the first job
    try:
        _copy_submitit_task(folder, job, following)
        _record(folder, Successor(job_id=following, after=job, exclude=exclude, time_s=now))
    except StorageError:
        slurm.cancel(following)
        raise
    return following


def _submit(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm) -> tuple[str, list[str]]:
    """Submit job.sh as a job behind `job`; return its id and the nodes that it excludes. If sbatch refuses the job, it
    is submitted without excluded nodes."""
    try:
        return slurm.submit(folder / "job.sh", _options(run, job, exclude)), exclude
    except ControllerUnreachableError:
        raise
    except CommandError:
        if not exclude:
            raise
        return slurm.submit(folder / "job.sh", _options(run, job, [])), []


def _options(run: Run, job: str, exclude: list[str]) -> list[str]:
    options = [f"--dependency=afterany:{job}"]
    if "begin" in sbatch_option_names(run):
        options.append("--begin=now")  # the begin time was meant for the first job
    return [*options, *exclude_options(run, exclude)]


def requeue_excluding_bad_nodes(folder: Path, run: Run, job: str, slurm: Slurm, now: float) -> None:
    """Requeue the job with id `job`, and exclude from it the nodes in the run's bad_nodes.jsonl.

    A running job keeps its nodes, so the nodes are excluded once the job waits. If Slurm refuses to exclude them, the
    job may start on them, because the plan gives a bad node no work.

    Raises:
        CommandError: the controller does not answer, or refuses the requeue.
    """
    slurm.requeue(job)
    exclude = nodes_to_exclude_if_known(folder, run, slurm, now)
    if exclude:
        with contextlib.suppress(CommandError):
            slurm.update(job, ExcNodeList=merged_exclude_list(run, exclude))


def _update_exclusions(
    folder: Path, run: Run, waiting: list[str], exclude: list[str], slurm: Slurm, now: float
) -> None:
    """Exclude the nodes in `exclude`, if there are any, from each waiting job for which successors.jsonl has other
    excluded nodes, and record this there. If Slurm refuses the change for a job, the job starts without it, and nothing
    is recorded.

    Args:
        waiting: ids of the successors that wait, in the order in which they would run.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        FileError, UntrustedError: successors.jsonl is damaged or untrusted.
        StorageError: successors.jsonl cannot be written.
    """
    excluded = {item.job_id: item.exclude for item in read_successors(folder)} if waiting and exclude else {}
    for job, after in zip(waiting, [_newest_job(folder), *waiting], strict=False):
        if set(exclude) == set(excluded.get(job, [])):
            continue
        try:
            slurm.update(job, ExcNodeList=merged_exclude_list(run, exclude))
        except ControllerUnreachableError:
            raise
        except CommandError:
            continue
        _record(folder, Successor(job_id=job, after=after, exclude=exclude, time_s=now))


def _record(folder: Path, successor: Successor) -> None:
    append_line(folder / SUCCESSORS_FILE, json.dumps(successor.to_json()))


def _copy_submitit_task(folder: Path, job: str, following: str) -> None:
    """Copy submitit's task file of the job `job` for the job `following`, because submitit looks for a file that is
    named after the job."""
    source = folder / "submitit" / f"{job}_submitted.pkl"
    target = folder / "submitit" / f"{following}_submitted.pkl"
    with storage_errors(target):
        shutil.copyfile(source, target)


def _newest_job(folder: Path) -> str:
    newest = job_id(folder)
    assert newest is not None, "a run that goes on has a job"
    return newest


CANCELLED_FILE = "cancelled"
"""File in a run folder that marks the run as cancelled, so that no process queues it again."""
SAVE_WAIT_S = 60.0
"""Seconds that the agents get to save a checkpoint before the job is cancelled."""
CANCEL_RETRY_S = 10.0
"""Seconds after which the request to save is sent again."""
POLL_S = 1.0


def cancel_job(folder: Path, job_id: str, slurm: Slurm, clock: Clock, at_once: bool = False) -> str:
    """Cancel a run's newest job and its successors; return a sentence that says what was done and from which checkpoint
    the run would continue.

    After the call none of these jobs starts again. If the job has ended and has no successors, nothing is done, and the
    run does not count as cancelled.

    Args:
        folder: the run folder.
        job_id: id of the newest job.
        at_once: whether to cancel a running job without giving the agents time to save.

    Raises:
        CommandError: the controller does not answer.
        StorageError: the run folder cannot be written.
    """
    job = slurm.job(job_id)
    ended = job is None or job.is_ended
    if ended and not waiting_successors(folder, slurm):
        return f"job {job_id} has ended already; {resume_text(folder)}"
    # The file comes first: a job that begins or ends from now on queues no other.
    write_text(folder / CANCELLED_FILE, utc_text(clock.wall()) + "\n")
    behind = cancel_successors(folder, slurm)
    if job is None or ended:
        return f"jobs {', '.join(behind)} cancelled; they were waiting; {resume_text(folder)}"
    if job.state != "RUNNING" or at_once:
        slurm.cancel(job_id)
        was = "waiting" if job.is_waiting else job.state.lower()
        return f"job {job_id} cancelled; it was {was}; {resume_text(folder)}"
    deadline, asked_s = clock.now() + SAVE_WAIT_S, -math.inf
    while clock.now() < deadline:
        if clock.now() - asked_s >= CANCEL_RETRY_S:
            # The signal is repeated: submitit ignores it in a task that is just starting.
            # A step that is sent TERM by its own id, as those of an array's task are, is ended by its srun.
            slurm.signal(job_id, "USR2" if "_" in job_id else "TERM")
            asked_s = clock.now()
        job = slurm.job(job_id)
        if job is None or job.is_ended:
            return f"job {job_id} ended; {resume_text(folder)}"
        clock.sleep(POLL_S)
    slurm.cancel(job_id)
    return (
        f"job {job_id} cancelled; it had not ended {SAVE_WAIT_S:g} s after it was asked to save; {resume_text(folder)}"
    )


def is_cancelled(folder: Path) -> bool:
    """Return whether a person cancelled the run in `folder`."""
    return (folder / CANCELLED_FILE).exists()


def check_no_live_job(folder: Path, slurm: Slurm) -> None:
    """Check that the newest job of the run in `folder` has ended and that no successor waits.

    Slurm is asked, because the run's files may be out of date: an agent that was cut off may have written them.

    Raises:
        InputError: the newest job or a successor waits or runs.
        RefusedError: the controller does not answer, so the state is unknown.
    """
    for job in open_jobs(folder):
        live = _live_state(folder, job, slurm)
        if live is not None:
            raise InputError(
                f"{folder.name}: its job {job} is {live}; wait for its end, or use `hpctrain cancel {folder.name}`"
            )


def check_own_folder(folder: Path, own_id: str | None, slurm: Slurm) -> None:
    """Check that the job of this process may use the run folder: it is the run's newest job, or the newest job has
    ended and this job is no successor that was queued behind a job before the newest one.

    Args:
        own_id: id of the job of this process; None outside of a job.

    Raises:
        RefusedError: another job uses the folder, or the controller does not answer.
        FileError, UntrustedError: successors.jsonl or the list of job ids is damaged or untrusted.
    """
    newest = job_id(folder)
    if newest is None or newest == own_id:
        return
    successors = read_successors(folder)
    if own_id in {item.job_id for item in successors} and newest not in job_chain(own_id, successors):
        raise RefusedError(
            f"{folder}: the run went on as job {newest}; this job ({own_id}) was queued for an earlier one"
        )
    live = _live_state(folder, newest, slurm)
    if live is not None:
        raise RefusedError(
            f"{folder}: the run went on as job {newest}, which is {live}; this job ({own_id or 'started by hand'}) "
            "leaves it alone"
        )


def _live_state(folder: Path, job: str, slurm: Slurm) -> str | None:
    """Return Slurm's state of a job that has not ended; None if the job has ended or Slurm no longer knows it.

    Raises:
        RefusedError: Slurm's controller does not answer.
    """
    try:
        info = slurm.job(job)
    except ControllerUnreachableError as error:
        raise RefusedError(f"{folder.name}: cannot tell whether its job {job} has ended: {error}") from None
    return None if info is None or info.is_ended else info.state
