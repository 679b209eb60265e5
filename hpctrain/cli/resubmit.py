"""`hpctrain resubmit RUN`: a new job for a run that ended early."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import click

from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.own_job import become_job, begin_own_job
from hpctrain.cli.own_job import option as own_job_option
from hpctrain.cli.watched import status_of
from hpctrain.launch.cancel import MARK
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.foresight import with_gpus
from hpctrain.launch.in_use import check_no_live_job
from hpctrain.launch.own_job import check_kind
from hpctrain.launch.queue import check_queue
from hpctrain.launch.secrets import check_secrets
from hpctrain.launch.submission import submit_job, submit_local
from hpctrain.launch.training import fewest_nodes
from hpctrain.records.locate import find_run, job_id
from hpctrain.records.run import read_run
from hpctrain.slurm.commands import Slurm


@click.command()
@click.argument("run")
@own_job_option
@click.option("--json", "as_json", is_flag=True, help="Print {name, folder, job_id} on stdout.")
def command(run: str, own_job: bool, as_json: bool) -> None:
    """Submit a run again that was cancelled or failed: it goes on in its own folder, from its last checkpoint."""
    folder = find_run(run, os.environ, Path.cwd())
    if own_job:
        _go_on_as_own_job(folder)
    _check_ended(folder)
    spec = read_run(folder / "run.yaml")
    check_secrets(spec, os.environ)
    if spec.cluster.kind == "slurm":
        slurm = Slurm(SystemRunner())
        notes = check_queue(spec, slurm, folder.parent)
        check_no_live_job(folder, slurm)
        asked, more = with_gpus(spec, slurm)
        for line in [*notes, *more]:
            click.echo(line, err=as_json)
        (folder / MARK).unlink(missing_ok=True)
        job = submit_job(RunFolder(folder.resolve()), asked)
    else:
        job = submit_local(RunFolder(folder.resolve()), fewest_nodes(spec))
    if as_json:
        click.echo(json.dumps({"name": folder.name, "folder": str(folder.resolve()), "job_id": job}))
    else:
        click.echo(f"job {job}, run folder {folder}")


def _go_on_as_own_job(folder: Path) -> NoReturn:
    """The run goes on as this batch job; does not return. A job that came back from the queue has the run already."""
    job = begin_own_job()
    if job_id(folder) != job:
        check_kind(read_run(folder / "run.yaml"))
        _check_ended(folder)
        check_no_live_job(folder, Slurm(SystemRunner()))
    become_job(folder, job)


def _check_ended(folder: Path) -> None:
    status = status_of(folder)
    if status.state not in ("failed", "cancelled", "unknown"):
        raise InputError(f"{folder.name}: it is {status.state} ({status.reason}); only a run that ended is resubmitted")
