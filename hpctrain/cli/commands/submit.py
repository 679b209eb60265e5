"""`hpctrain submit`: start a run as one Slurm job, or as a background process of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, submission, warn
from hpctrain.cli.commands.resubmit import become_job, begin_own_job, earlier_run, own_job_option
from hpctrain.cli.commands.sweep import submit_sweep
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.options.parameters import PATH, set_option
from hpctrain.cli.options.slurm_options import SlurmOptions, slurm_options
from hpctrain.cli.options.starting import profile_option, with_profile
from hpctrain.cli.options.sweep import expand_sweep, sweep_options
from hpctrain.jobs.bad_nodes import record_excluded_nodes
from hpctrain.jobs.dependencies import with_dependencies
from hpctrain.jobs.partition_checks import nodes_of_allocation
from hpctrain.launch.local import check_gpus
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs, fewest_nodes, make_folder, prepare, runs_folder
from hpctrain.launch.preflight.queue_checks import check_provisional
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.probe import has_part_of_nodes
from hpctrain.launch.queueing import (
    check_for_queue,
    prepare_submission,
    queue_run,
    script_to_be,
    start_in_background,
    with_site,
)
from hpctrain.launch.slurm_job.job_script import check_is_slurm, run_in_allocation
from hpctrain.launch.slurm_job.queue import wait_for_job
from hpctrain.launch.sweep import first_run
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `hpctrain submit`: check only, wait for the end of the run, print JSON."""

    dry_run: bool
    wait: bool
    as_json: bool

    def say(self, lines: Iterable[str]) -> None:
        """Print lines for a person: on stdout, or on stderr with --json."""
        say(lines, self.as_json)


@click.command()
@click.argument("run_file", type=PATH, metavar="RUN.YAML")
@slurm_options
@click.option("--topology", type=PATH, help="Topology file of the nodes. Default: probe.")
@click.option("--plan", type=PATH, help="Plan file, obeyed to the letter. Default: plan.")
@set_option
@click.option("--site", metavar="NAME", help="Profile of site.yaml. Default: the first one that matches this place.")
@sweep_options
@profile_option
@click.option(
    "--local", is_flag=True, help="Start the run in the background of this machine, whatever cluster.kind is."
)
@click.option("--dry-run", is_flag=True, help="Check everything and show the job script; submit nothing.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended; its exit code comes back.")
@own_job_option
@click.option("--json", "as_json", is_flag=True, help="Print {name, folder, job_id} on stdout; a dry run, its script.")
def submit_command(
    run_file: Path, topology: Path | None, plan: Path | None, overrides: tuple[str, ...], site: str | None,
    sweeps: tuple[str, ...], sweep_file: Path | None, array_limit: int | None, profile: int | None, local: bool,
    dry_run: bool, wait: bool, own_job: bool, as_json: bool, **sbatch: Any,
) -> None:  # fmt: skip
    """Submit RUN.YAML as one job: probe if needed, plan, train, recover.

    The command returns at once. First it checks the job against the cluster, chooses the partition that fits best if
    you name none, and asks Slurm when the job would start. The job measures its nodes if needed, plans for them and
    trains. After the loss of a node, training goes on with the other nodes. After a preemption, the time limit or the
    loss of too many nodes, another job, or the same one requeued, continues from the newest checkpoint. Inside an
    existing allocation (salloc) the run starts immediately. With --own-job, as in slurm/train.sbatch, your batch job
    becomes the run's job, and continues the run when it is requeued.

    Slurm's options (-p to --gpus-per-node) mean what they mean to sbatch. They override the keys of `cluster` in the
    run file that mean the same; -J is the run's name.

    With --sweep and --sweep-file, the runs of a sweep become the tasks of one job array, each with its own folder and
    its own recovery. `hpctrain list`, `status`, `compare`, `report`, `cancel` and `resubmit` take the sweep's name.
    --json then prints {name, folder, job_id, runs} with a list of the runs.
    """
    click.get_current_context().with_resource(owner_only())
    options = SlurmOptions(**sbatch)
    here = ("cluster.kind=local",) if local else ()
    overrides = (*with_profile(overrides, profile), *options.overrides(), *here)
    given = RunInputs(run_file, overrides, topology, plan)
    points = expand_sweep(sweeps, sweep_file, overrides)
    if array_limit is not None and not points:
        raise InputError("--array-limit: only for the runs of a sweep; add --sweep or --sweep-file")
    asked = SubmitOptions(dry_run, wait, as_json)
    if own_job:
        if dry_run or wait or as_json or points or local:
            useless = "--dry-run, --wait, --json, --sweep and --local"
            raise InputError(f"--own-job: the job turns into the run; leave out {useless}")
        options.check_not_given("--own-job", but=["job_name"])
        _submit_as_own_job(given, site)
    slurm = Slurm(SystemRunner())
    given, site_lines = with_site(given, site, slurm)
    run = first_run(given, points) if points else given.run()
    options.check_are_used(run, local)
    given = replace(given, overrides=(*given.overrides, *options.gpu_overrides(run, slurm, os.environ)))
    if points:
        if wait or local or _is_inside():
            raise InputError("--sweep: only for jobs that are queued: not inside of salloc, no --wait, no --local")
        asked.say(site_lines)
        submit_sweep(given, points, array_limit, slurm, dry_run, as_json)
        return
    queued = given.run().cluster.kind == "slurm"
    asked.say(site_lines)
    prepared = prepare_submission(given, local, slurm, SystemRunner(), asked.say)
    warn_if_stale(prepared.topology, prepared.nodes or None)
    if not queued:
        warn(login_node_words(fewest_nodes(prepared.run), slurm, os.environ))
        _submit_here(prepared, asked)
    elif _is_inside():
        say(options.unused_in_allocation(), as_json)
        _submit_in_allocation(prepared, asked)
    else:
        _submit_to_slurm(prepared, slurm, asked)


def _is_inside() -> bool:
    """Return whether this process runs in an existing Slurm allocation."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def _submit_to_slurm(prepared: PreparedRun, slurm: Slurm, asked: SubmitOptions) -> None:
    prepared, checked = check_for_queue(prepared, slurm, SystemClock(), asked.say)
    if asked.dry_run:
        script = script_to_be(checked.asked)
        _would(prepared, asked.as_json, script, script=script)
        return
    started = queue_run(prepared, checked, slurm, SystemRunner(), SystemClock(), asked.say)
    _tell(started.folder, started.job_id, asked.as_json)
    if asked.wait:
        watch = wait_for_job(started.folder, started.job_id, slurm, SystemClock(), lambda text: asked.say([text]))
        sys.exit(watch)


def _submit_in_allocation(prepared: PreparedRun, asked: SubmitOptions) -> None:
    prepared = _not_waiting(prepared, "the allocation is there already", asked.as_json)
    say(_provisional(prepared), asked.as_json)
    if asked.dry_run:
        script = script_to_be(prepared.run)
        _would(prepared, asked.as_json, script, script=script)
        return
    job_id = os.environ["SLURM_JOB_ID"]
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    warn(add_to_history("submit", folder.path, job_id, Slurm(SystemRunner())))
    _tell(folder.path, job_id, asked.as_json)
    _run_here(folder, prepared, job_id)


def _provisional(prepared: PreparedRun) -> list[str]:
    """Return the lines of a provisional plan for the nodes of the allocation that this process is in."""
    part = has_part_of_nodes(Slurm(SystemRunner()), os.environ)
    return check_provisional(prepared, runs_folder(), nodes_of_allocation(os.environ), part)


def _not_waiting(prepared: PreparedRun, why: str, as_json: bool) -> PreparedRun:
    if not prepared.run.cluster.after:
        return prepared
    say([f"cluster.after: not waited for, as {why}"], as_json)
    return replace(prepared, run=with_dependencies(prepared.run, []))


def _submit_as_own_job(given: RunInputs, site: str | None) -> NoReturn:
    """Make the batch job of this process the job of a new run; if Slurm requeued the job, continue its run. Does not
    return.

    Args:
        site: name of the profile in site.yaml; None: the first that matches this cluster.
    """
    job = begin_own_job()
    before = earlier_run(job)
    if before is not None:
        become_job(before, job)
    given, _ = with_site(given, site, Slurm(SystemRunner()))
    prepared = prepare(given, SystemRunner(), queued=True)
    warn_if_stale(prepared.topology)
    check_is_slurm(prepared.run)
    prepared = _not_waiting(prepared, "this job runs already", True)
    say(_provisional(prepared), True)
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    record_excluded_nodes(folder.path, prepared.topology, SystemClock().wall(), prepared.run.recovery.exclude_hours)
    become_job(folder.path, job, prepared.run)


def _run_here(folder: RunFolder, prepared: PreparedRun, job_id: str) -> NoReturn:
    """Run the job script within this Slurm allocation, and exit with its code; does not return."""
    code = run_in_allocation(folder, prepared.run, job_id, SystemRunner(), lambda text: warn([text]))
    newest = folder.attempts()[-1:] or [{"reason": "the job script did not get to its run"}]
    warn([newest[0].get("reason", "the job script was killed")])
    sys.exit(code)


def _submit_here(prepared: PreparedRun, asked: SubmitOptions) -> None:
    if asked.wait:
        raise InputError("--wait: to watch a local run to its end, start it with `hpctrain train` instead")
    if asked.dry_run:
        count = fewest_nodes(prepared.run)
        asked.say(check_gpus(count, prepared.run.cluster.device, os.environ))
        text = f"would start {count} virtual nodes of this machine in the background"
        _would(prepared, asked.as_json, text, nodes=count)
        return
    started = start_in_background(prepared, SystemRunner(), SystemClock(), asked.say)
    _tell(started.folder, started.job_id, asked.as_json)


def _would(prepared: PreparedRun, as_json: bool, text: str, **more: object) -> None:
    """Print the result of a dry run.

    Args:
        text: printed for a person.
        more: printed with `as_json`, beside the run's name and a folder and job id of null.
    """
    nothing = {"name": prepared.run.name, "folder": None, "job_id": None}
    click.echo(json.dumps({**nothing, **more}) if as_json else text)


def _tell(folder: Path, job_id: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(submission(folder, job_id)))
        return
    click.echo(f"job {job_id}, run folder {folder}")
    name = folder.name
    click.echo(f"watch: hpctrain watch {name}\nlogs:  hpctrain logs -f {name}")
    click.echo(f"look:  hpctrain status {name}\nstop:  hpctrain cancel {name}")
