"""`hpctrain status RUN`: the state of a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.cli.answers import say
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.cli.views.run_status import run_status
from hpctrain.report.terminal import status_lines
from hpctrain.runs.locate import job_id


@click.command("status")
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def command(folder: Path, as_json: bool) -> None:
    """Say how a run is doing: its state, its step and what it waits for.

    RUN is a run folder, a run's name or a job's id. Names and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then
    among the runs that you started anywhere; of several folders with that name the newest counts.

    Slurm's queue is asked first, then its accounting if it has one; the files of the run folder decide the rest.

    State is one of queued, starting, running, recovering, requeued, done, failed, cancelled, unknown. The exit code is
    0 in every state; it is not 0 only if the status cannot be found out.
    """
    status = run_status(folder)
    if as_json:
        more = {"folder": str(folder), "job_id": job_id(folder)}
        click.echo(json.dumps({**status.to_json(), **{k: v for k, v in more.items() if v}}, allow_nan=False))
        return
    say(status_lines(status, SystemClock().wall()))
