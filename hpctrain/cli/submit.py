"""`hpctrain submit`: a run as one job, or as a supervisor in the background of this machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.own_job import become_job, begin_own_job, earlier_run
from hpctrain.cli.own_job import option as own_job_option
from hpctrain.cli.profile import option as profile_option
from hpctrain.cli.profile import with_profile
from hpctrain.cli.provisional import check_provisional
from hpctrain.launch.allocation import run_in_allocation
from hpctrain.launch.code import left_out_words
from hpctrain.launch.folder import RunFolder, removed_on_error
from hpctrain.launch.foresight import with_gpus
from hpctrain.launch.job_nodes import nodes_of_job
from hpctrain.launch.own_job import check_kind
from hpctrain.launch.queue import check_queue, wait_for_job
from hpctrain.launch.site import with_exported
from hpctrain.launch.space import space_words
from hpctrain.launch.submission import preview, submit_job, submit_local
from hpctrain.launch.training import Prepared, fewest_nodes, make_folder, prepare, runs_folder
from hpctrain.records.run import read_run
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), metavar="RUN.YAML")
@click.option("-t", "--topology", type=click.Path(path_type=Path), help="Topology file of the nodes. Default: probe.")
@click.option("-p", "--plan", type=click.Path(path_type=Path), help="Plan file, obeyed to the letter. Default: plan.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@profile_option
@click.option("--dry-run", is_flag=True, help="Check everything and show the job script; submit nothing.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended; its exit code comes back.")
@own_job_option
@click.option("--json", "as_json", is_flag=True, help="Print {name, folder, job_id} on stdout; a dry run, its script.")
def command(
    run_file: Path, topology: Path | None, plan: Path | None, overrides: tuple[str, ...], profile: int | None,
    dry_run: bool, wait: bool, own_job: bool, as_json: bool,
) -> None:  # fmt: skip
    """Submit RUN.YAML as one job: probe if needed, plan, train, requeue.

    Returns at once. In the job, each attempt measures its nodes, plans for them and trains; a lost node, a preemption
    or the time limit puts the job back into the queue, where it goes on from its last checkpoint. Inside an existing
    allocation (salloc) the run starts there and then; with --own-job, as slurm/train.sbatch has it, the batch job that
    a person submitted becomes the run's job, and resumes the run when it comes back from the queue.
    """
    overrides = with_profile(overrides, profile)
    if own_job:
        if dry_run or wait or as_json:
            raise InputError("--own-job: the job turns into the run; leave out --dry-run, --wait and --json")
        _submit_as_own_job(run_file, overrides, topology, plan)
    queued = read_run(run_file, overrides).cluster.kind == "slurm"
    prepared = prepare(run_file, overrides, None, topology, plan, SystemRunner(), queued=queued)
    _say(space_words(prepared.run, prepared.spec, runs_folder()), as_json)
    if queued:
        _submit_to_slurm(prepared, dry_run, wait, as_json)
    else:
        _submit_here(prepared, dry_run, wait, as_json)


def _submit_to_slurm(prepared: Prepared, dry_run: bool, wait: bool, as_json: bool) -> None:
    slurm = Slurm(SystemRunner())
    inside = os.environ.get("SLURM_JOB_ID")
    asked = prepared.run
    if not inside:
        run, lines = with_exported(prepared.run, os.environ)
        prepared = replace(prepared, run=run)
        _say([*lines, *check_queue(run, slurm, runs_folder())], as_json)
        asked, words = with_gpus(run, slurm)
        _say(words, as_json)
    nodes = None if prepared.topology else nodes_of_job(prepared.run, slurm, os.environ)
    _say(check_provisional(prepared, runs_folder(), nodes), as_json)
    if dry_run:
        script = preview(asked, runs_folder().resolve() / f"{prepared.run.name}-<time>")
        _would(prepared, as_json, script, script=script)
        return
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    _say(left_out_words(folder.path), as_json)
    if inside:
        _told(folder.path, inside, as_json)
        _run_here(folder, prepared, inside)
    with removed_on_error(folder):
        job_id = submit_job(folder, asked)
    _told(folder.path, job_id, as_json)
    if wait:
        sys.exit(wait_for_job(folder.path, job_id, slurm, SystemClock(), lambda text: _say([text], as_json)))


def _submit_as_own_job(
    run_file: Path, overrides: tuple[str, ...], topology: Path | None, plan: Path | None
) -> NoReturn:
    """The run as this batch job; does not return."""
    job = begin_own_job()
    before = earlier_run(job)
    if before is not None:
        become_job(before, job)
    prepared = prepare(run_file, overrides, None, topology, plan, SystemRunner(), queued=True)
    check_kind(prepared.run)
    nodes = None if topology else nodes_of_job(prepared.run, Slurm(SystemRunner()), os.environ)
    _say(check_provisional(prepared, runs_folder(), nodes), as_json=True)
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    become_job(folder.path, job, prepared.run)


def _run_here(folder: RunFolder, prepared: Prepared, job_id: str) -> NoReturn:
    """The run inside this allocation; does not return."""

    def say(text: str) -> None:
        click.echo(f"hpctrain: {text}", err=True)

    code = run_in_allocation(folder, prepared.run, job_id, SystemRunner(), say)
    attempts = folder.attempts()
    say(
        attempts[-1].get("reason", "the job script was killed") if attempts else "the job script did not get to its run"
    )
    sys.exit(code)


def _submit_here(prepared: Prepared, dry_run: bool, wait: bool, as_json: bool) -> None:
    if wait:
        raise InputError("--wait: to watch a local run to its end, start it with `hpctrain train` instead")
    count = fewest_nodes(prepared.run)
    if dry_run:
        _would(prepared, as_json, f"would start {count} virtual nodes of this machine in the background", nodes=count)
        return
    folder = make_folder(prepared, runs_folder(), SystemRunner(), SystemClock())
    _say(left_out_words(folder.path), as_json)
    with removed_on_error(folder):
        job_id = submit_local(folder, count)
    _told(folder.path, job_id, as_json)


def _would(prepared: Prepared, as_json: bool, text: str, **more: object) -> None:
    """What a dry run shows: the keys of a submission, with nothing behind them yet."""
    nothing = {"name": prepared.run.name, "folder": None, "job_id": None}
    click.echo(json.dumps({**nothing, **more}) if as_json else text)


def _told(folder: Path, job_id: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"name": folder.name, "folder": str(folder), "job_id": job_id}))
        return
    click.echo(f"job {job_id}, run folder {folder}")
    click.echo(f"look: hpctrain status {folder.name}   stop: hpctrain cancel {folder.name}")


def _say(lines: list[str], as_json: bool) -> None:
    for line in lines:
        click.echo(line, err=as_json)
