"""Starts runs as jobs of the cluster, or in the background of this machine: `hpctrain submit` and `hpctrain.api.submit`
call the functions of this module in the order in which they are defined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import RefusedError
from hpctrain.base.process import Runner
from hpctrain.hf.folder import hf_warnings
from hpctrain.jobs.bad_nodes import record_excluded_nodes
from hpctrain.jobs.dependencies import record_dependent_run, refresh_dependency
from hpctrain.jobs.successors import nodes_to_exclude_if_known, queue_successors
from hpctrain.launch.local import check_gpus
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, fewest_nodes, make_folder, prepare, runs_folder
from hpctrain.launch.preflight.queue_checks import check_before_queueing, check_provisional
from hpctrain.launch.preflight.site import check_not_queued_here, site_defaults, with_sbatch_variables
from hpctrain.launch.slurm_job.queue import CheckedRun, check_queue, estimate_start
from hpctrain.launch.submission import preview, submit_job, submit_local
from hpctrain.records.run.run import Run
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.file_system import checkpoint_space_warning
from hpctrain.runs.folder import RunFolder, remove_on_error
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm

Say = Callable[[Iterable[str]], None]
"""Function that shows lines for a person."""


@dataclass(frozen=True)
class StartedRun:
    """A run that was started in the background."""

    folder: Path
    """The run folder."""
    job_id: str
    """Id of the Slurm job; for a run of this machine, the process id of its supervisor."""


def with_site(given: RunInputs, site: str | None, slurm: Slurm) -> tuple[RunInputs, list[str]]:
    """Return the inputs with this cluster's defaults from site.yaml, and lines that name the defaults that the run
    uses.

    Args:
        given: the inputs as the user gave them.
        site: name of the profile in site.yaml; None: the first that matches this cluster.

    Raises:
        FileError, InputError: site.yaml is wrong or has no such profile, or the run file is wrong.
    """
    defaults = site_defaults(site, slurm, os.environ)
    if defaults is None:
        return given, []
    return replace(given, defaults=defaults.values), defaults.words(given.run_file, given.overrides)


def prepare_submission(given: RunInputs, here: bool, slurm: Slurm, runner: Runner, say: Say) -> PreparedRun:
    """Return the run with all its inputs, after checking them; say what may go wrong with its checkpoints or its
    model. Nothing is written.

    Args:
        here: whether the user asked to train on this machine, even if the machine has Slurm.

    Raises:
        FileError, InputError: a file is wrong or missing; or `cluster.kind` is local on a machine with Slurm, and
            `here` is False.
        RefusedError: the plan is provisional, or does not fit the topology.
        HpctrainError: the process that builds the model failed.
    """
    run = given.run()
    queued = run.cluster.kind == "slurm"
    if not queued and not here:
        train = f"`hpctrain train {given.run_file} --local {fewest_nodes(run)}`"
        check_not_queued_here(slurm, f"add --local (in the background), or {train}")
    prepared = prepare(given, runner, queued=queued)
    say(checkpoint_space_warning(prepared.run, prepared.spec, runs_folder(), prepared.plan))
    say(hf_warnings(prepared.run))
    return prepared


def check_for_queue(prepared: PreparedRun, slurm: Slurm, clock: Clock, say: Say) -> tuple[PreparedRun, CheckedRun]:
    """Check a run against the cluster as it is now, and choose its partition if it names none. Return the run as it is
    to be recorded, and what the check found. Nothing is written.

    Raises:
        InputError: there is no Slurm here, an option cannot be used, or the source of a bind does not exist.
        RefusedError: no partition takes the job, the model does not fit, a run in the image would fail, or a run that
            it waits for has failed.
        HpctrainError: the image cannot be started.
        CommandError: the controller does not answer, and the run waits for others.
    """
    run, lines = with_sbatch_variables(prepared.run, os.environ)
    say([*lines, *check_before_queueing(run)])
    checked, start = _taken_by_slurm(run, slurm, clock)
    say(checked.lines)
    prepared = replace(prepared, run=checked.run)
    say(check_provisional(prepared, runs_folder(), checked.nodes, checked.part, checked.limit, checked.price))
    say(start)
    return prepared, checked


def queue_run(
    prepared: PreparedRun, checked: CheckedRun, slurm: Slurm, runner: Runner, clock: Clock, say: Say
) -> StartedRun:
    """Make the folder of a run, and submit its job.

    Args:
        prepared: the run as it is to be recorded.
        checked: what `check_for_queue` found.

    Raises:
        CommandError: sbatch refused the job; nothing is left of the run folder.
        KeptFolderError: the submission failed, and Slurm may have the job nevertheless; the run folder is left.
        StorageError: the run folder cannot be written.
        InputError: there is no Slurm on the path, or `code` of the run file cannot be copied.
    """
    job = checked.asked
    folder = make_folder(prepared, runs_folder(), runner, clock)
    say(omitted_secrets_text(folder.path))
    with remove_on_error(folder):
        record_dependent_run(checked.before, folder.path)
        job_id = submit_job(folder, job, slurm, _without_excluded(folder, prepared, job, slurm, clock, say))
    say(add_to_history("submit", folder.path, job_id, slurm))
    say(queue_successors(folder.path, job, slurm, clock.wall()))
    if checked.before.folders:
        # A run that this one waits for may have continued as another job meanwhile, which did not know of this one.
        say(refresh_dependency(folder.path, slurm, os.environ, checked.before.jobs))
    return StartedRun(folder.path, job_id)


def start_in_background(prepared: PreparedRun, runner: Runner, clock: Clock, say: Say) -> StartedRun:
    """Start a run of this machine in the background; it goes on after this process has ended.

    Raises:
        CommandError: the background process of the run (`hpctrain train --resume`) cannot be started.
        StorageError: the run folder cannot be written.
        InputError: `code` of the run file cannot be copied, or cluster.device is cuda and there are fewer GPUs than
            nodes.
    """
    count = fewest_nodes(prepared.run)
    say(check_gpus(count, prepared.run.cluster.device, os.environ))
    folder = make_folder(prepared, runs_folder(), runner, clock)
    say(omitted_secrets_text(folder.path))
    with remove_on_error(folder):
        job_id = submit_local(folder, count, runner)
    say(add_to_history("submit", folder.path, job_id, None))
    return StartedRun(folder.path, job_id)


def script_to_be(job: Run) -> str:
    """Return the job script of a run whose folder is not made yet.

    Raises:
        InputError: as of `render_job`.
    """
    return preview(job, runs_folder().resolve() / f"{job.name}-<time>")


def _taken_by_slurm(run: Run, slurm: Slurm, clock: Clock) -> tuple[CheckedRun, list[str]]:
    """Return the run in the partition that `check_queue` chose, and lines with Slurm's estimate of its start.

    If sbatch refuses the job there, the next best partition is tried.

    Raises:
        RefusedError: sbatch refuses the job in the chosen partition, and in the next best one if there is one; the
            message is its answer for the chosen partition.
    """
    checked = check_queue(run, slurm, runs_folder(), os.environ, Path.cwd())
    try:
        return checked, _start_words(checked.asked, slurm, clock)
    except RefusedError as error:
        if not checked.others:
            raise
        refused, name = error, checked.others[0]
    other = run.model_copy(update={"cluster": run.cluster.model_copy(update={"partition": name})})
    following = check_queue(other, slurm, runs_folder(), os.environ, Path.cwd())
    try:
        start = _start_words(following.asked, slurm, clock)
    except RefusedError:
        raise refused from None
    words = f"partition {name} chosen: of {checked.run.cluster.partition}, {refused}"
    return replace(following, lines=[words, *following.lines]), start


def _start_words(job: Run, slurm: Slurm, clock: Clock) -> list[str]:
    return estimate_start(job, script_to_be(job), slurm, clock.wall())


def _without_excluded(
    folder: RunFolder, prepared: PreparedRun, job: Run, slurm: Slurm, clock: Clock, say: Say
) -> list[str]:
    """Add the nodes that the verdict of the user's topology excludes to the run's bad_nodes.jsonl, and return those
    that the first job is to exclude; [] if there is no topology or it excludes none.

    Args:
        prepared: the run, its topology and its plan.
        job: the run with what its job requests from Slurm, such as the number of GPUs.
    """
    now = clock.wall()
    bad = record_excluded_nodes(folder.path, prepared.topology, now, job.recovery.exclude_hours)
    if not bad:
        return []
    exclude = nodes_to_exclude_if_known(folder.path, job, slurm, now)
    remaining = sorted(set(bad) - set(exclude))
    say([f"the topology excludes {', '.join(exclude)}: the job does without"] if exclude else [])
    more = "the job may get it, and the plan leaves it out"
    say([f"the topology excludes {', '.join(remaining)}: {more}"] if remaining else [])
    return exclude
