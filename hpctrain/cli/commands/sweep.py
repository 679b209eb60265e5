"""What `hpctrain submit --sweep` does: check the runs of a sweep, and submit or show them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich.table import Table

from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, submission
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.views.console import table_console
from hpctrain.launch.preflight.prepare import RunInputs
from hpctrain.launch.sweep import CheckedSweep, check_sweep, queue_sweep
from hpctrain.launch.sweep_settings import Settings
from hpctrain.slurm.commands import Slurm


def submit_sweep(
    given: RunInputs, points: Sequence[Settings], limit: int | None, slurm: Slurm, dry_run: bool, as_json: bool
) -> None:
    """Submit the runs of a sweep as the tasks of one job array; of a dry run, show the runs and the script.

    Args:
        given: the inputs that all runs share.
        points: what each run sets.
        limit: most runs that train at the same time; None: no limit.

    Raises:
        HpctrainError: as of `check_sweep` and `queue_sweep`.
    """
    runner, clock = SystemRunner(), SystemClock()
    sweep = check_sweep(given, points, limit, slurm, runner, clock, lambda lines: say(lines, as_json))
    warn_if_stale(sweep.prepared[0].topology)
    if dry_run:
        _show(sweep, as_json)
        return
    started = queue_sweep(sweep, slurm, runner, clock, lambda lines: say(lines, as_json))
    runs = [
        {**submission(folder, job_id), "settings": item.settings}
        for item, (folder, job_id) in zip(sweep.named, started.runs, strict=True)
    ]
    if as_json:
        click.echo(json.dumps({**submission(started.folder, started.job_id), "runs": runs}))
        return
    for run_answer in runs:
        click.echo(f"job {run_answer['job_id']}, run folder {run_answer['folder']}")
    name = started.folder.name
    click.echo(f"job array {started.job_id}, {len(runs)} runs, sweep folder {started.folder}")
    click.echo(f"look:    hpctrain status {name}\ncompare: hpctrain compare {name}\nstop:    hpctrain cancel {name}")


def _show(sweep: CheckedSweep, as_json: bool) -> None:
    script = sweep.script_to_be()
    if as_json:
        runs = [{"name": item.name, "folder": None, "job_id": None, "settings": item.settings} for item in sweep.named]
        click.echo(json.dumps({"name": sweep.name, "folder": None, "job_id": None, "runs": runs, "script": script}))
        return
    keys = list(dict.fromkeys(key for item in sweep.named for key in item.settings))
    table = Table(box=None, pad_edge=False)
    for column in ("task", "run", *keys):
        table.add_column(column, justify="right" if column == "task" else "left", overflow="fold")
    for task, item in enumerate(sweep.named):
        table.add_row(str(task), item.name, *(item.settings.get(key, "") for key in keys))
    table_console().print(table)
    click.echo(f"\n{script}", nl=False)
