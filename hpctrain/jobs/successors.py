"""Queues and cancels successors: jobs that wait behind the running one and continue the run without its bad nodes.

A successor starts when the previous job has ended in any way, even if no process of hpctrain was left to queue a job.
It is recorded before it can start, because the job that it waits for queues it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from hpctrain.base.atomic import append_line, storage_errors
from hpctrain.base.errors import CommandError, HpctrainError, StorageError
from hpctrain.jobs.bad_nodes import select_excluded_nodes
from hpctrain.jobs.partition_checks import exclude_options, merged_exclude_list, nodes_of_job, sbatch_option_names
from hpctrain.records.history.ledger import SUCCESSORS_FILE, Successor, read_bad_nodes, read_successors
from hpctrain.records.run.run import Run
from hpctrain.runs.locate import job_id, open_jobs, record_job
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm


def submit_next(folder: Path, run: Run, slurm: Slurm, now: float) -> str:
    """Make the next job the run's newest one and return its id: a successor that waits already, else a new job.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        CommandError: sbatch refused the job.
        FileError: a ledger of the run is damaged; no job was queued.
        StorageError: the run folder cannot be written; no job was queued.
    """
    waiting = waiting_successors(folder, slurm)
    exclude = nodes_to_exclude(folder, run, slurm, now)
    if waiting:
        _update_exclusion(folder, run, waiting[0], exclude, slurm, now)
    following = waiting[0] if waiting else queue_behind(folder, run, _newest_job(folder), exclude, slurm, now)
    record_job(folder, following)
    return following


def ensure_queued(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Queue successors until there are `recovery.successors` of them; return the ids of the new ones.

    Raises:
        CommandError: the controller does not answer or sbatch refused a job; those before it are queued.
        StorageError: the run folder cannot be written.
    """
    if not run.recovery.successors or run.recovery.requeue != "new_job":
        return []
    chain = [_newest_job(folder), *waiting_successors(folder, slurm)]
    exclude = nodes_to_exclude(folder, run, slurm, now)
    added: list[str] = []
    while len(chain) <= run.recovery.successors:
        chain.append(queue_behind(folder, run, chain[-1], exclude, slurm, now))
        added.append(chain[-1])
    return added


def queue_successors(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Queue the successors of a run that was just submitted; return what a person should know, as lines.

    A refusal is no error: the run's job is queued, and tries again when it starts.
    """
    try:
        added = ensure_queued(folder, run, slurm, now)
    except HpctrainError as error:
        return [f"recovery.successors: not all are queued ({error}); the job queues the rest when it starts"]
    return [f"queued behind it: {', '.join(added)}"] if added else []


def waiting_successors(folder: Path, slurm: Slurm) -> list[str]:
    """Return the successors of the newest job that have not ended, the next one first."""
    behind = open_jobs(folder)[1:]
    if not behind:
        return []
    known = slurm.jobs(behind)
    return [job for job in behind if job in known and not known[job].is_ended]


def cancel_successors(folder: Path, slurm: Slurm, asking_job: str | None = None) -> list[str]:
    """Cancel the successors of the newest job and return their ids; the last one first, so that none starts.

    Args:
        asking_job: it ends by itself and is not cancelled.

    Raises:
        CommandError: the controller does not answer; a successor of an ended run ends as soon as it starts.
    """
    waiting = [job for job in waiting_successors(folder, slurm) if job != asking_job]
    for job in reversed(waiting):
        slurm.cancel(job)
    return waiting


def nodes_to_exclude(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """Return the nodes in the run's bad_nodes.jsonl that the next job excludes.

    Raises:
        CommandError: the controller does not answer.
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
    """Return what `nodes_to_exclude` returns, or [] if bad_nodes.jsonl cannot be read or the controller does not
    answer, so that neither stops a submission."""
    try:
        return nodes_to_exclude(folder, run, slurm, now)
    except HpctrainError:
        return []


def queue_behind(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm, now: float) -> str:
    """Queue job.sh once more, to start when `job` has ended; return the new job's id.

    An unrecorded job behind `job` is used instead: sbatch answered too late, or the process that asked was killed.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        CommandError: sbatch refused the job, also without the excluded nodes.
        StorageError: the run folder cannot be written; the job was cancelled again.
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
    """Return the new job's id and the nodes that it excludes."""
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
    """Requeue a job, and exclude from it the nodes that are known to be bad.

    A running job keeps its nodes, so the exclusion is set once it waits. If Slurm refuses that change, the job starts
    anyway: the plan gives a bad node no work.

    Raises:
        CommandError: the controller does not answer, or refuses the requeue.
    """
    slurm.requeue(job)
    exclude = nodes_to_exclude_if_known(folder, run, slurm, now)
    if exclude:
        with contextlib.suppress(CommandError):
            slurm.update(job, ExcNodeList=merged_exclude_list(run, exclude))


def _update_exclusion(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm, now: float) -> None:
    """Exclude the nodes that are bad by now from a waiting job. A job that cannot be changed starts as it is."""
    if not exclude:
        return
    try:
        slurm.update(job, ExcNodeList=merged_exclude_list(run, exclude))
    except ControllerUnreachableError:
        raise
    except CommandError:
        return
    _record(folder, Successor(job_id=job, after=_newest_job(folder), exclude=exclude, time_s=now))


def _record(folder: Path, successor: Successor) -> None:
    append_line(folder / SUCCESSORS_FILE, json.dumps(successor.to_json()))


def _copy_submitit_task(folder: Path, job: str, following: str) -> None:
    """Copy submitit's task for the next job: submitit looks for a file that is named after the job."""
    source = folder / "submitit" / f"{job}_submitted.pkl"
    target = folder / "submitit" / f"{following}_submitted.pkl"
    with storage_errors(target):
        shutil.copyfile(source, target)


def _newest_job(folder: Path) -> str:
    newest = job_id(folder)
    assert newest is not None, "a run that goes on has a job"
    return newest
