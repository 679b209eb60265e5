"""`hpctrain resubmit RUN`: submits a new job for a run that ended early. Also the option `--own-job` of `submit` and
`resubmit`.

With `--own-job`, the command is the last one of your own batch script, and the script's job becomes the run's job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError, InputError, RefusedError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, submission, warn
from hpctrain.cli.options.completion import setting_items
from hpctrain.cli.options.parameters import RUNS
from hpctrain.cli.options.slurm_options import SlurmOptions, slurm_options
from hpctrain.jobs.dependencies import (
    record_dependent_run,
    refresh_dependency,
    refresh_dependent_runs,
    with_dependencies,
)
from hpctrain.jobs.run_status import run_status, run_statuses
from hpctrain.jobs.successors import CANCELLED_FILE, check_no_live_job, nodes_to_exclude_if_known, queue_successors
from hpctrain.launch.preflight.changed_settings import ALLOWED, run_with_changes, write_changed_settings
from hpctrain.launch.preflight.prepare import fewest_nodes
from hpctrain.launch.preflight.site import check_not_queued_here
from hpctrain.launch.slurm_job.job_script import adopt_job, check_is_slurm, current_batch_job_id, is_requeued_job
from hpctrain.launch.slurm_job.queue import check_queue, estimate_start
from hpctrain.launch.submission import preview, submit_job, submit_local
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import RunFolder, check_trusted
from hpctrain.runs.locate import job_id, run_of_job, scan_runs, untrusted_folders_text
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text, restarting_from_seed
from hpctrain.runs.secrets import check_secrets
from hpctrain.runs.started_runs import add_to_history, check_cluster
from hpctrain.runs.sweeps import NamedRuns
from hpctrain.slurm.commands import Slurm

own_job_option = click.option(
    "--own-job", is_flag=True, help="In a batch script: its job becomes the run's job, and Slurm may requeue it."
)


@click.command()
@click.argument("named", metavar="RUN|SWEEP", type=RUNS)
@slurm_options
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=f"Change a key of {', '.join(ALLOWED)}.",
    shell_complete=lambda ctx, param, incomplete: setting_items(incomplete, ALLOWED),
)  # fmt: skip
@click.option("--from-seed", is_flag=True, help="Begin again from the seed; checkpoints that are there are put aside.")
@own_job_option
@click.option("--json", "as_json", is_flag=True, help="Print {name, folder, job_id} on stdout; of a sweep, a list.")
def resubmit_command(
    named: NamedRuns, overrides: tuple[str, ...], from_seed: bool, own_job: bool, as_json: bool, **sbatch: Any
) -> None:
    """Submit a run again that was cancelled or failed: it continues in its run folder, from its last checkpoint.

    RUN is a run folder, a run's name or a job's id. With --set and Slurm's options (-p to --gpus-per-node), it
    continues with changed settings, as far as its checkpoint allows; the earlier settings stay in the run folder as
    run-<n>.yaml. To continue a run that is done, give it more steps (`--set steps=N`). SWEEP is the name or the folder
    of a sweep, or the id of its job array: each of its runs that was cancelled or failed is submitted again, as a job
    of its own.
    """
    click.get_current_context().with_resource(owner_only())
    for folder in named.runs:
        check_trusted(folder)
    options = SlurmOptions(**sbatch)
    if own_job:
        if overrides or from_seed or named.is_sweep:
            words = "a job that comes back from the queue keeps its settings; leave out --set and --from-seed"
            raise InputError(f"--own-job: {'it continues one run, not a sweep' if named.is_sweep else words}")
        options.check_not_given("--own-job")
        _go_on_as_own_job(named.folder)
    if not named.is_sweep:
        _print(_resubmit(named.folder, overrides, options, from_seed, as_json), as_json)
        return
    submitted: list[dict[str, str]] = []
    refused: list[str] = []
    try:
        for folder in _ended(named, as_json):
            try:
                submitted.append(_resubmit(folder, overrides, options, from_seed, as_json))
            except HpctrainError as error:
                text = str(error)
                refused.append(text if text.startswith(f"{folder.name}: ") else f"{folder.name}: {text}")
                continue
            if not as_json:
                _print(submitted[-1], as_json)
    finally:
        # Submitted jobs are printed even after an error: otherwise nobody would know their ids.
        if as_json:
            click.echo(json.dumps(submitted))
    if refused:
        raise CommandError("\n".join(refused))


def _ended(named: NamedRuns, as_json: bool) -> list[Path]:
    """Return the folders of those runs of a sweep that were cancelled or failed, or whose status cannot be read; print
    the state of the other runs.

    Raises:
        InputError: there is no such run.
    """
    ended = []
    for folder, status in zip(named.runs, run_statuses(named.runs), strict=True):
        if not isinstance(status, HpctrainError) and status.state not in ("failed", "cancelled"):
            say([f"{folder.name}: it is {status.state}, and left as it is"], as_json)
        else:
            ended.append(folder)
    if not ended:
        raise InputError(f"{named.folder.name}: no run of this sweep was cancelled or failed; nothing to submit again")
    return ended


def _print(answer: dict[str, str], as_json: bool) -> None:
    click.echo(json.dumps(answer) if as_json else f"job {answer['job_id']}, run folder {answer['folder']}")


def _resubmit(
    folder: Path, overrides: tuple[str, ...], options: SlurmOptions, from_seed: bool, as_json: bool
) -> dict[str, str]:
    """Submit a new job for the run in `folder`; return the object that --json prints."""
    slurm = Slurm(SystemRunner())
    overrides = (*overrides, *options.overrides())
    run = run_of(folder, overrides)
    options.check_are_used(run)
    overrides += options.gpu_overrides(run, slurm, os.environ)
    spec = run_with_changes(folder, overrides, from_seed)
    _check_ended(folder, spec.steps)
    check_secrets(spec, os.environ)
    if not from_seed and (lost := lost_checkpoints_text(folder)) is not None:
        raise RefusedError(lost)
    if spec.cluster.kind == "slurm":
        check_cluster(folder, slurm, "resubmit")
        job = _submit_again(RunFolder(folder), spec, slurm, from_seed, as_json)
    else:
        check_not_queued_here(slurm, f"`hpctrain train --resume {folder.name}`")
        with write_changed_settings(RunFolder(folder), spec), _from_seed(RunFolder(folder), from_seed):
            job = submit_local(RunFolder(folder), fewest_nodes(spec), SystemRunner())
    warn(add_to_history("resubmit", folder, job, slurm if spec.cluster.kind == "slurm" else None))
    return submission(folder, job)


def _from_seed(folder: RunFolder, wanted: bool) -> contextlib.AbstractContextManager[object]:
    return restarting_from_seed(folder, SystemClock().wall()) if wanted else contextlib.nullcontext()


def _submit_again(folder: RunFolder, spec: Run, slurm: Slurm, from_seed: bool, as_json: bool) -> str:
    """Submit a new job for an existing run; return the job's id.

    Args:
        spec: the run with its new settings.
        from_seed: begin again from the seed, not from the newest checkpoint.
        as_json: print remarks on stderr, because stdout holds JSON.
    """
    # A run that has begun no longer waits for its dependencies, and those jobs may be gone.
    waits = with_dependencies(spec, []) if folder.attempts() else spec
    checked = check_queue(waits, slurm, folder.path.parent, os.environ, Path.cwd())
    check_no_live_job(folder.path, slurm)
    say(checked.lines, as_json)
    say(estimate_start(checked.asked, preview(checked.asked, folder.path), slurm, SystemClock().wall()), as_json)
    after = checked.before.names or spec.cluster.after
    spec = with_dependencies(checked.run, after)
    with write_changed_settings(folder, spec):
        record_dependent_run(checked.before, folder.path)
        (folder.path / CANCELLED_FILE).unlink(missing_ok=True)
        exclude = nodes_to_exclude_if_known(folder.path, checked.asked, slurm, SystemClock().wall())
        with _from_seed(folder, from_seed):
            job = submit_job(folder, checked.asked, slurm, exclude)
    say(queue_successors(folder.path, checked.asked, slurm, SystemClock().wall()), as_json)
    say(
        refresh_dependency(folder.path, slurm, os.environ, checked.before.jobs) if checked.before.folders else [],
        as_json,
    )
    say(refresh_dependent_runs(folder.path, slurm, os.environ), as_json)
    return job


def _go_on_as_own_job(folder: Path) -> NoReturn:
    """Continue the run in the batch job of this process; does not return.

    A job that Slurm requeued already is the run's job. Any other job becomes the run's job, if the run has ended.

    Raises:
        InputError: the run has not ended, and its job is another one; or as of `become_job`, whose other errors are
            raised, too.
    """
    job = begin_own_job()
    if job_id(folder) != job:
        check_is_slurm(run_of(folder))
        _check_ended(folder)
        check_no_live_job(folder, Slurm(SystemRunner()))
    become_job(folder, job)


def _check_ended(folder: Path, steps: int | None = None) -> None:
    """Check that the run has ended and may continue.

    Args:
        steps: the run's new number of steps, by which a run that is done may continue; None: such a run is refused.

    Raises:
        InputError: the run has not ended, or it is done and `steps` gives it no further step.
    """
    status = run_status(folder)
    if status.state == "done" and steps is not None:
        if steps <= status.steps:
            raise InputError(
                f"{folder.name}: it is done; `--set steps=N` with more than {status.steps} goes on with it"
            )
    elif status.state not in ("failed", "cancelled", "unknown"):
        raise InputError(f"{folder.name}: it is {status.state} ({status.reason}); only a run that ended is resubmitted")


def begin_own_job() -> str:
    """Return the id of this process's batch job, and ignore SIGTERM from now on.

    SIGTERM is the notice of a preemption, which the run's job script handles. If this process ended on the notice,
    within the grace time, Slurm would count the job as over.

    Raises:
        InputError: this process is in no batch job.
    """
    job = current_batch_job_id(os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return job


def earlier_run(job: str) -> Path | None:
    """Return the folder of the run whose job was `job` before Slurm requeued the job.

    None at the job's first start, or if no run folder names the job.
    """
    if not is_requeued_job(os.environ):
        return None
    folder = run_of_job(job, os.environ, Path.cwd())
    others = scan_runs(os.environ, Path.cwd()).untrusted if folder is None else []
    if others:
        warn([f"job {job} came back and no run folder had it; {untrusted_folders_text(others)}"])
    return folder


def become_job(folder: Path, job: str, run: Run | None = None) -> NoReturn:
    """Make a batch job the run's job, and replace this process by the run's job script; does not return.

    Args:
        job: id of the batch job in which this process runs.
        run: the run; None: read from its folder.

    Raises:
        InputError: the run folder is untrusted, or a file in it has errors.
        StorageError: the run folder cannot be written.
        CommandError: bash cannot be started.
    """
    folder = folder.resolve()
    check_trusted(folder)
    is_new = job_id(folder) != job
    argv = adopt_job(folder, run or run_of(folder), job)
    if is_new:
        slurm = Slurm(SystemRunner())
        warn(add_to_history("submit", folder, job, slurm))
        warn(refresh_dependent_runs(folder, slurm, os.environ))
    warn([f"job {job}, run folder {folder}"])
    SystemRunner().replace_process(argv, os.environ)
