"""What `hpctrain submit --sweep` does: check the runs of a sweep, and submit or show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import click
from rich.table import Table

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.answers import say, submission
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.cli.options.sweep import Settings, run_names, settings_text
from hpctrain.cli.views.console import table_console
from hpctrain.launch.preflight.prepare import RunInputs
from hpctrain.launch.sweep import CheckedSweep, NamedSettings, check_sweep, queue_sweep, sweep_overrides
from hpctrain.records.run.run import Run
from hpctrain.slurm.commands import Slurm


def submit_sweep(
    given: RunInputs, points: Sequence[Settings], limit: int | None, slurm: Slurm, dry_run: bool, as_json: bool
) -> None:
    """Submit the runs of a sweep as the tasks of one job array; of a dry run, show the runs and the script.

    Args:
        given: the inputs that all runs share.
        points: what each run sets.
        limit: most runs that train at once; None: no limit.
    """
    run = first_run(given, points)
    if run.cluster.kind != "slurm":
        raise InputError("--sweep: only for jobs that are queued: cluster.kind slurm; found local")
    if limit is not None and not run.recovery.successors:
        given = _as_same_job(given)
    names = run_names(run.name, points)
    named = [NamedSettings(name, settings) for name, settings in zip(names, points, strict=True)]
    runner, clock = SystemRunner(), SystemClock()
    sweep = check_sweep(given, run.name, named, limit, slurm, runner, clock, lambda lines: say(lines, as_json))
    warn_if_stale(sweep.prepared[0].topology)
    if limit is not None and sweep.jobs[0].recovery.requeue == "new_job":
        words = "does not count a run that continues as another job (recovery.requeue: new_job)"
        say([f"--array-limit {limit} {words}; with same_job and no successors it does"], as_json)
    if dry_run:
        _show(sweep, as_json)
        return
    started = queue_sweep(sweep, slurm, runner, clock, lambda lines: say(lines, as_json))
    runs = [
        {**submission(folder, job_id), "settings": item.settings}
        for item, (folder, job_id) in zip(named, started.runs, strict=True)
    ]
    if as_json:
        click.echo(json.dumps({**submission(started.folder, started.job_id), "runs": runs}))
        return
    for run_answer in runs:
        click.echo(f"job {run_answer['job_id']}, run folder {run_answer['folder']}")
    name = started.folder.name
    click.echo(f"job array {started.job_id}, {len(runs)} runs, sweep folder {started.folder}")
    click.echo(f"look:    hpctrain status {name}\ncompare: hpctrain compare {name}\nstop:    hpctrain cancel {name}")


def first_run(given: RunInputs, points: Sequence[Settings]) -> Run:
    """Return the first run of a sweep, before its name is set.

    Raises:
        InputError: the run file or a setting is wrong; the message names the run.
    """
    try:
        return replace(given, overrides=(*given.overrides, *sweep_overrides(points[0]))).run()
    except InputError as error:
        raise InputError(f"--sweep: run 1 of {len(points)} ({settings_text(points[0])}): {error}") from None


def _as_same_job(given: RunInputs) -> RunInputs:
    """Return the inputs with `recovery.requeue: same_job`, unless the run file has the key: a run that continues as a
    new job is no task of the array any more, and would not count in its limit."""
    recovery = {"requeue": "same_job", **given.defaults.get("recovery", {})}
    return replace(given, defaults={**given.defaults, "recovery": recovery})


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
