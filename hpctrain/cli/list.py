"""`hpctrain list`: the runs here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.watched import status_of
from hpctrain.records.locate import all_runs


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout and nothing else.")
def command(as_json: bool) -> None:
    """List the runs in ./runs and in $HPCTRAIN_RUNS with their state, oldest first."""
    rows = [_row(folder) for folder in all_runs(os.environ, Path.cwd())]
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no runs here; `hpctrain init` writes a run file to start with")
    for row in rows:
        click.echo(f"{row['state']:<10} {row['step']:>7}/{row['steps']:<7} {row['folder']}")


def _row(folder: Path) -> dict[str, object]:
    try:
        status = status_of(folder)
    except HpctrainError as error:
        return {"folder": str(folder), "state": "unknown", "reason": str(error), "step": 0, "steps": 0}
    return {
        "folder": str(folder),
        "state": status.state,
        "reason": status.reason,
        "step": status.step,
        "steps": status.steps,
    }
