"""`hpctrain prune [RUNS…]`: disk space of old runs and checkpoints, and how to free it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes
from hpctrain.runs.locate import all_runs, find_run
from hpctrain.runs.prune import Removal, jobs_of, removable, remove_all, why_in_use
from hpctrain.slurm.commands import Slurm

UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--older-than", metavar="AGE", help="Whole runs without a sign of life for AGE too: 12h, 30d, 8w.")
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Newest verified checkpoints to keep of each run.",
)
@click.option("--yes", is_flag=True, help="Remove what is listed. Default: only list it.")
@click.option("--json", "as_json", is_flag=True, help="Print {removed, size_bytes, items, kept} on stdout.")
def command(runs: tuple[str, ...], older_than: str | None, keep_checkpoints: int, yes: bool, as_json: bool) -> None:
    """List what old runs and checkpoints would free; remove it with --yes.

    RUNS are run folders, names or job ids; default: all runs in ./runs and in $HPCTRAIN_RUNS. Of each run, all
    checkpoints but the newest verified one are listed, and unfinished files of killed writers. With --older-than, old
    runs are listed as a whole, with their last checkpoint (`hpctrain prune RUN --older-than 0h --yes` removes that
    run).

    A run that may be alive is never touched: a process holds its folder, its job is in the queue (or Slurm cannot say),
    or its files changed in the last 15 minutes.
    """
    age_s = _seconds(older_than) if older_than is not None else None
    named = [find_run(run, os.environ, Path.cwd()) for run in runs] if runs else all_runs(os.environ, Path.cwd())
    folders = list(dict.fromkeys(folder.resolve() for folder in named))
    slurm, now = Slurm(SystemRunner()), SystemClock().wall
    jobs, items, spared = jobs_of(folders, slurm), list[Removal](), list[str]()
    for folder in folders:
        words = why_in_use(folder, jobs, now())
        if words is not None:
            spared.append(f"{folder}: {words}")
        else:
            items += removable(folder, now(), age_s, keep_checkpoints)
    if not as_json:
        _list(items, spared)
    if yes:
        refused = remove_all(items, lambda folder: jobs_of([folder], slurm), now)
        spared += refused
        for line in refused:
            click.echo(f"left alone after all: {line}", err=True)
        items = [item for item in items if not item.path.exists()]
    if as_json:
        click.echo(json.dumps(_machine_form(items, spared, yes)))
    elif items:
        total = format_bytes(sum(item.size_bytes for item in items))
        click.echo(f"{total} removed" if yes else f"{total} would be free; nothing was removed, --yes does it")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip())
    if match is None:
        raise InputError(f"--older-than: found '{text}'; allowed: hours, days or weeks, as in 12h, 30d, 8w")
    return float(match[1]) * UNITS_S[match[2]]


def _list(items: list[Removal], spared: list[str]) -> None:
    for line in spared:
        click.echo(f"left alone: {line}")
    if not items:
        click.echo("nothing to prune")
        return
    for item in items:
        click.echo(f"{format_bytes(item.size_bytes):>10}  {item.kind:<10}  {item.path}  ({item.why})")


def _machine_form(items: list[Removal], spared: list[str], yes: bool) -> dict[str, object]:
    rows = [
        {"kind": item.kind, "path": str(item.path), "size_bytes": item.size_bytes, "why": item.why} for item in items
    ]
    return {"removed": yes, "size_bytes": sum(item.size_bytes for item in items), "items": rows, "kept": spared}
