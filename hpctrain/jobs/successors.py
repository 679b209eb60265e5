"""The jobs that a run goes on as: queued behind the one that runs, without the nodes that made trouble.

A successor starts when the job before it has ended, however it ended, and whether or not anything of hpctrain was left
to say so. It is written down before it can start: the job that it waits for is the one that queues it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from hpctrain.base.atomic import append_line, storage_errors
from hpctrain.base.errors import CommandError, HpctrainError, StorageError
from hpctrain.jobs.bad_nodes import select_excluded_nodes
from hpctrain.jobs.job_nodes import exclude_options, merged_exclude_list, nodes_of_job, sbatch_option_names
from hpctrain.records.history.bad_node import read_bad_nodes
from hpctrain.records.history.successor import SUCCESSORS_FILE, Successor, read_successors
from hpctrain.records.run.run import Run
from hpctrain.runs.locate import job_id, open_jobs, record_job
from hpctrain.slurm.commands import ControllerUnreachableError, Slurm


def submit_next(folder: Path, run: Run, slurm: Slurm, now: float) -> str:
    """Make the next job the run's newest one: that which waits already, else a new one. Its id comes back.

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
    """Queue successors behind the newest job until there are as many as the run wants; ids of the new ones.

    Raises:
        CommandError: the controller is away or sbatch refused a job; those before it are queued.
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
    """`ensure_queued` for a run that was submitted just now: what a person should know, as lines. Its job is queued by
    now and tries again when it starts, so a refusal is no error."""
    try:
        added = ensure_queued(folder, run, slurm, now)
    except HpctrainError as error:
        return [f"recovery.successors: not all are queued ({error}); the job queues the rest when it starts"]
    return [f"queued behind it: {', '.join(added)}"] if added else []


def waiting_successors(folder: Path, slurm: Slurm) -> list[str]:
    """The jobs behind the newest one that Slurm still has, the next one first."""
    behind = open_jobs(folder)[1:]
    if not behind:
        return []
    known = slurm.jobs(behind)
    return [job for job in behind if job in known and not known[job].state.is_ended]


def cancel_successors(folder: Path, slurm: Slurm, own: str | None = None) -> list[str]:
    """Cancel what waits behind the newest job, the last one first, so that none of them starts meanwhile.

    Args:
        own: the job that asks, which ends by itself.

    Raises:
        CommandError: the controller does not answer; a successor of a run that has ended ends at once by itself.
    """
    waiting = [job for job in waiting_successors(folder, slurm) if job != own]
    for job in reversed(waiting):
        slurm.cancel(job)
    return waiting


def nodes_to_exclude(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """The nodes that the next job does without, of those in the run's ledger.

    Raises:
        CommandError: the controller does not answer.
    """
    bad = [line for line in read_bad_nodes(folder) if line.expires_s > now]
    if not bad:
        return []
    state = slurm.state()
    allowed = nodes_of_job(run, state)
    if allowed is None:
        # A constraint chooses among them, in Slurm's own way: sbatch refuses a job that could never start.
        free: dict[str, object] = {"sbatch": [], "constraint": None, "groups": [], "reservation": None}
        anywhere = run.cluster.model_copy(update=free)
        allowed = nodes_of_job(run.model_copy(update={"cluster": anywhere}), state) or frozenset()
    usable = {node.name for node in state.nodes if node.accepts_jobs and node.name in allowed}
    fraction = run.recovery.exclude_max_fraction
    return select_excluded_nodes(bad, now, allowed, usable, run.cluster.node_range[0], fraction)


def nodes_to_exclude_if_known(folder: Path, run: Run, slurm: Slurm, now: float) -> list[str]:
    """`nodes_to_exclude` as far as it is known: a damaged ledger or a controller that is away stops no submission."""
    try:
        return nodes_to_exclude(folder, run, slurm, now)
    except HpctrainError:
        return []


def queue_behind(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm, now: float) -> str:
    """Queue job.sh once more, to start when `job` has ended; its id comes back.

    A job that sbatch queued and nobody wrote down is taken: its answer came too late, or who asked was killed.

    Raises:
        ControllerUnreachableError: the controller does not answer.
        CommandError: sbatch refused the job, also without the excluded nodes.
        StorageError: the run folder cannot be written; the job was cancelled again.
    """
    known = {item.job_id for item in read_successors(folder)}
    unknown = [found for found in slurm.queued_behind(folder / "job.sh", job) if found not in known]
    if unknown:
        following, exclude = unknown[0], []
    else:
        following, exclude = _submit(folder, run, job, exclude, slurm)
    if "hold" in sbatch_option_names(run):
        slurm.release(following)  # it was for the first job
    try:
        _copy_submitit_task(folder, job, following)
        _record(folder, Successor(job_id=following, after=job, exclude=exclude, time_s=now))
    except StorageError:
        slurm.cancel(following)
        raise
    return following


def _submit(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm) -> tuple[str, list[str]]:
    """The new job's id, and the nodes that it does without."""
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
        options.append("--begin=now")  # the time was that of the first job
    return [*options, *exclude_options(run, exclude)]


def requeue_excluding_bad_nodes(folder: Path, run: Run, job: str, slurm: Slurm, now: float) -> None:
    """Put a job back into the queue, where it waits without the nodes that are bad by now.

    A job that runs keeps its nodes, so they are changed once it waits. Where Slurm does not take the change, the job
    starts as it is: a bad node gets no part of the plan.

    Raises:
        CommandError: the controller does not answer, or refuses the requeue.
    """
    slurm.requeue(job)
    exclude = nodes_to_exclude_if_known(folder, run, slurm, now)
    if exclude:
        with contextlib.suppress(CommandError):
            slurm.update(job, ExcNodeList=merged_exclude_list(run, exclude))


def _update_exclusion(folder: Path, run: Run, job: str, exclude: list[str], slurm: Slurm, now: float) -> None:
    """Let a job that waits do without the nodes that are bad by now; one that cannot be changed starts as it is."""
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
    """What submitit's task of the next job runs: the same; it looks for a file that is named by the job."""
    source = folder / "submitit" / f"{job}_submitted.pkl"
    target = folder / "submitit" / f"{following}_submitted.pkl"
    with storage_errors(target):
        shutil.copyfile(source, target)


def _newest_job(folder: Path) -> str:
    newest = job_id(folder)
    assert newest is not None, "a run that goes on has a job"
    return newest
