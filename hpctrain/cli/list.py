"""`hpctrain list`: the runs here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.watched import statuses_of
from hpctrain.records.locate import all_runs
from hpctrain.report.status import Status


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout and nothing else.")
def command(as_json: bool) -> None:
    """List the runs in ./runs and in $HPCTRAIN_RUNS with their state, oldest first."""
    folders = all_runs(os.environ, Path.cwd())
    rows = [_row(folder, status) for folder, status in zip(folders, statuses_of(folders), strict=True)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no runs here; `hpctrain init` writes a run file to start with")
    for row in rows:
        click.echo(f"{row['state']:<10} {row['step']:>7}/{row['steps']:<7} {row['folder']}")


def _row(folder: Path, status: Status | HpctrainError) -> dict[str, object]:
    if isinstance(status, HpctrainError):
        return {"folder": str(folder), "state": "unknown", "reason": str(status), "step": 0, "steps": 0}
    return {
        "folder": str(folder),
        "state": status.state,
        "reason": status.reason,
        "step": status.step,
        "steps": status.steps,
    }
