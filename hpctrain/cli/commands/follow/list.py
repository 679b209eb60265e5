"""`hpctrain list`: the runs in this folder, and those that you started in other folders."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

import click

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.cli.answers import warn
from hpctrain.cli.views.run_status import run_statuses
from hpctrain.report.status import RunStatus
from hpctrain.runs.locate import job_id, past_folders, run_name, scan_runs, sorted_by_age, untrusted_folders_text

GONE = "its folder is gone: removed or moved"
TELLING = ("failed", "recovering", "requeued", "unknown")
"""States that are shown with their reason; the other states need none."""


@click.command("list")
@click.option("--here", is_flag=True, help="Only the runs in ./runs and in $HPCTRAIN_RUNS.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout and nothing else.")
def command(here: bool, as_json: bool) -> None:
    """List the runs here, and those you started elsewhere, with their state, the newest last.

    Runs here lie in ./runs and in $HPCTRAIN_RUNS. Runs elsewhere are read from $XDG_STATE_HOME/hpctrain/history.jsonl
    (by default in ~/.local/state). A run whose folder no longer exists has the state `gone`. In the JSON form, `job_id`
    is the run's newest job, and null for a run of local processes.
    """
    here_now = scan_runs(os.environ, Path.cwd())
    local = set(here_now.trusted)
    past = past_folders(os.environ)
    folders = sorted_by_age(local if here else {*local, *past})
    there = [folder for folder in folders if folder in local or _is_there(folder)]
    statuses = dict(zip(there, run_statuses(there), strict=True))
    rows = [_row(folder, _newest_job(folder, past.get(folder, ())), statuses.get(folder)) for folder in folders]
    if here_now.untrusted:
        warn([untrusted_folders_text(here_now.untrusted)])
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no runs here; `hpctrain init` writes a run file to start with")
    for row in rows:
        progress = f"{row['step']:>7}/{row['steps']:<7}" if row["state"] != "gone" else " " * 15
        click.echo(f"{row['state']:<10} {progress} {row['folder']}")
        if row["state"] in TELLING:
            click.echo(f"{'':<10} {row['reason']}")


def _is_there(folder: Path) -> bool:
    try:
        return (folder / "run.yaml").exists()
    except OSError:
        return True  # permission denied: the state `unknown` says so


def _newest_job(folder: Path, remembered: Collection[str]) -> str | None:
    """Return the run's newest job: from its folder, otherwise from the history, where the largest id is the newest."""
    try:
        job = job_id(folder)
    except InputError:  # others could have written the file; the state `unknown` says so
        job = None
    return job or max(remembered, key=lambda known: (len(known), known), default=None)


def _row(folder: Path, job: str | None, status: RunStatus | HpctrainError | None) -> dict[str, object]:
    row: dict[str, object] = {
        "name": run_name(folder.name), "folder": str(folder), "job_id": job,
        "state": "unknown", "reason": str(status), "step": 0, "steps": 0,
    }  # fmt: skip
    if status is None:
        return {**row, "state": "gone", "reason": GONE}
    if isinstance(status, HpctrainError):
        return row
    reason = "; ".join([status.reason, *status.further_words])
    return {**row, "state": status.state, "reason": reason, "step": status.step, "steps": status.steps}
