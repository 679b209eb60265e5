"""Commands that show how runs are doing: `list`, `logs`, `status` and `watch`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, EXIT_FAILED, HpctrainError, InputError
from hpctrain.base.units import format_age
from hpctrain.cli.answers import JSON_LINES_OPTION, print_json, say, warn
from hpctrain.cli.options.parameters import RUN, RUNS
from hpctrain.cli.views.console import Console
from hpctrain.cli.views.watching import watch_run, watch_sweep
from hpctrain.jobs.run_status import WatchedRun, run_status, run_statuses
from hpctrain.report.event_text import log_line_text
from hpctrain.report.logs import LogLine, find_logs, follow_lines, last_lines
from hpctrain.report.status import RunStatus, State
from hpctrain.report.terminal import cost_text, status_lines
from hpctrain.runs.locate import job_id, past_folders, run_name, scan_runs, sorted_by_age, untrusted_folders_text
from hpctrain.runs.sweeps import NamedRuns, sweeps_of

GONE = "its folder is gone: removed or moved"
TELLING = ("queued", "failed", "recovering", "requeued", "unknown")
"""States that `hpctrain list` shows with their reason, such as what a run waits for; the other states need none."""
FIGURES = ("loss", "valid_loss", "tokens_per_s", "eta_s", "last_sign_s", "node_hours", "gpu_hours", "energy",
           "expected_start_s", "needs_action")  # fmt: skip
"""Keys of `RunStatus` that a row of `hpctrain list` has besides its state and step; null where not known."""


@click.command("list")
@click.option("--here", is_flag=True, help="Only the runs in ./runs and in $HPCTRAIN_RUNS.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list on stdout and nothing else.")
def list_command(here: bool, as_json: bool) -> None:
    """List the runs here, and those you started elsewhere, with their state, the newest last.

    Runs here lie in ./runs and in $HPCTRAIN_RUNS. Runs elsewhere are read from $XDG_STATE_HOME/hpctrain/history.jsonl
    (by default in ~/.local/state). A run whose folder no longer exists has the state `gone`. In the JSON form, `job_id`
    is the run's newest job; for a run that `hpctrain submit` started on this machine, the id of its background process;
    null for a run of `hpctrain train`.

    Columns: state, step of the run's steps, training loss, age of the newest line in the run's files, cost so far in
    GPU-hours (without GPUs, or if their number is not known, in node-hours), and folder. Below a run that waits or
    failed stands why. The files of a run that has ended are read once; its row is then kept in
    $XDG_STATE_HOME/hpctrain/ended_runs.json, which you may remove.

    A sweep is one line that counts its runs by state; `hpctrain status SWEEP` shows them one by one. In the JSON form
    each run is an object, and `sweep` is the folder of its sweep, or null.
    """
    here_now = scan_runs(os.environ, Path.cwd())
    local = set(here_now.trusted)
    past = past_folders(os.environ)
    folders = sorted_by_age(local if here else {*local, *past})
    there = [folder for folder in folders if folder in local or _is_there(folder)]
    statuses = dict(zip(there, run_statuses(there), strict=True))
    rows = [_row(folder, _newest_job(folder, past.get(folder, ())), statuses.get(folder)) for folder in folders]
    sweeps = sweeps_of(folders)
    for folder, row in zip(folders, rows, strict=True):
        row["sweep"] = str(sweeps[folder]) if folder in sweeps else None
    if here_now.untrusted:
        warn([untrusted_folders_text(here_now.untrusted)])
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no runs here; `hpctrain init` writes a run file to start with")
    shown: set[object] = set()
    for row in rows:
        sweep = row["sweep"]
        if sweep is None:
            _list_row(row)
        elif sweep not in shown:
            shown.add(sweep)
            states = Counter(str(other["state"]) for other in rows if other["sweep"] == sweep)
            counted = ", ".join(f"{state} {states[state]}" for state in sorted(states, key=_STATES.index))
            click.echo(f"{'sweep':<10} {counted:<42} {sweep}")


def _list_row(row: dict[str, Any]) -> None:
    progress = f"{row['step']:>7}/{row['steps']:<7}" if row["state"] != "gone" else " " * 15
    loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
    age = "" if row["last_sign_s"] is None else format_age(row["last_sign_s"])
    cost = cost_text(row["node_hours"], row["gpu_hours"])
    click.echo(f"{row['state']:<10} {progress} {loss:>8} {age:>6} {cost:>11} {row['folder']}")
    if row["state"] in TELLING:
        click.echo(f"{'':<10} {row['reason']}")


_STATES = (*get_args(State)[::-1], "gone")
"""States in the order in which the line of a sweep counts them: ended ones first."""


def _is_there(folder: Path) -> bool:
    try:
        return (folder / "run.yaml").exists()
    except OSError:
        return True  # permission denied: the state `unknown` says so


def _newest_job(folder: Path, remembered: Collection[str]) -> str | None:
    """Return the id of the run's newest job; None if it has none.

    The newest job is the one that the run folder names. If the run folder names none, it is the job with the largest
    of the remembered ids.

    Args:
        remembered: ids of the run's jobs in the history.
    """
    try:
        job = job_id(folder)
    except InputError:  # others could have written the file; the state `unknown` says so
        job = None
    return job or max(remembered, key=lambda known: (len(known), known), default=None)


def _row(folder: Path, job: str | None, status: RunStatus | HpctrainError | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": run_name(folder.name), "folder": str(folder), "job_id": job,
        "state": "unknown", "reason": str(status), "step": 0, "steps": 0, **dict.fromkeys(FIGURES),
    }  # fmt: skip
    if status is None:
        return {**row, "state": "gone", "reason": GONE}
    if isinstance(status, HpctrainError):
        return row
    reason = "; ".join([status.reason, *status.further_words])
    figures = {key: getattr(status, key) for key in FIGURES}
    return {**row, "state": status.state, "reason": reason, "step": status.step, "steps": status.steps, **figures}


LINES = 50


@click.command()
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, through requeues, until the run is over.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this global rank, wherever it ran.")
@click.option("--node", help="Only the agent and the workers of this node.")
@click.option("--attempt", type=click.IntRange(min=0), help="Only this attempt; default: all.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=LINES, help="Last lines of all logs together; 0: every line."
)
@JSON_LINES_OPTION
def logs_command(
    folder: Path, follow: bool, rank: int | None, node: str | None, attempt: int | None, lines: int, as_json: bool
) -> None:
    """Print the end of the logs of a run, merged by time: logs of the job script, the agents and the workers.

    RUN is a run folder, a run's name or a job's id. Each line begins with its time (UTC) and the name of its log in
    RUN/logs: 0/node1.0 is the first worker of node1 in attempt 0, 7.node1.agent is the agent of node1 in job 7.
    Libraries print lines without a time; such a line follows the line before it in its log. Lines of srun and Slurm in
    the log of a job script have no time either; they stand before the next line with a time, or at the end. Events are
    printed as sentences.
    """
    show = _print_log_line_as_json if as_json else _print_log_line
    find = partial(find_logs, folder, node, rank, attempt)
    files = find()
    if not files and not follow:
        raise InputError(f"{folder.name}: no log of that kind in {folder / 'logs'}")
    readers, shown = last_lines(files, lines or None, rest=not follow)
    for line in shown:
        show(line)
    if not follow:
        return
    clock = SystemClock()
    watched = WatchedRun(folder, clock)
    try:
        for line in follow_lines(readers, find, clock, lambda: watched.is_over(watched.look())):
            show(line)
    except KeyboardInterrupt:
        click.echo(f"\nno longer followed; the run goes on: `hpctrain logs -f {folder.name}`", err=True)
        return
    status = watched.look()
    click.echo(f"{status.name}: {status.state} - {status.reason}", err=True)


def _print_log_line(line: LogLine) -> None:
    moment = datetime.fromtimestamp(line.time_s, timezone.utc)
    time_of_day = f"{moment:%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}"
    click.echo(f"{time_of_day} {line.source} | {log_line_text(line.text)}")


def _print_log_line_as_json(line: LogLine) -> None:
    print_json({"time_s": line.time_s, "source": line.source, "text": log_line_text(line.text)})


@click.command("status")
@click.argument("named", metavar="RUN|SWEEP", type=RUNS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def status_command(named: NamedRuns, as_json: bool) -> None:
    """Say how a run or each run of a sweep is doing: its state, its step and what it waits for.

    RUN is a run folder, a run's name or a job's id. Names and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then
    among the runs that you started anywhere; of several folders with that name the newest counts.

    Slurm's queue is asked first, then Slurm's accounting if the cluster has it; the files of the run folder decide the
    rest.

    State is one of queued, starting, running, recovering, requeued, done, failed, cancelled, unknown. The exit code is
    0 in every state; it is not 0 only if the status cannot be found out.

    SWEEP is the name or the folder of a sweep, or the id of its job array. Its JSON form is {name, folder, job_id,
    runs}; a run has the keys of `hpctrain list`.
    """
    if named.is_sweep:
        _sweep_status(named, as_json)
        return
    folder = named.folder
    status = run_status(folder)
    if as_json:
        more = {"folder": str(folder), "job_id": job_id(folder)}
        click.echo(json.dumps({**status.to_json(), **{k: v for k, v in more.items() if v}}, allow_nan=False))
        return
    say(status_lines(status, SystemClock().wall()))


def _sweep_status(named: NamedRuns, as_json: bool) -> None:
    statuses = run_statuses(named.runs)
    rows = [_row(run, _newest_job(run, ()), status) for run, status in zip(named.runs, statuses, strict=True)]
    if as_json:
        sweep = {"name": run_name(named.folder.name), "folder": str(named.folder), "job_id": job_id(named.folder)}
        click.echo(json.dumps({**sweep, "runs": rows}))
        return
    for row in rows:
        _list_row(row)


EXIT_INTERRUPTED = 130
"""Exit code of `hpctrain watch` after Ctrl-C, the same as that of shells: 128 + SIGINT. The run goes on."""


@click.command()
@click.argument("named", metavar="RUN|SWEEP", type=RUNS)
@JSON_LINES_OPTION
def watch_command(named: NamedRuns, as_json: bool) -> None:
    """Watch a run until it ends: its progress, figures, slowest ranks, and last events, and why it waits.

    RUN is a run folder, a run's name or a job's id. On a terminal the view is redrawn each second; elsewhere each
    change is a line. With --json, each new event, each new step and each change of the state is a line: an object with
    one key, `event`, `metrics` or `status`, whose value is that of events.jsonl, metrics.jsonl or `status --json`.

    SWEEP is the name or the folder of a sweep, or the id of its job array. Its view has a line for each run. A change
    begins with the name of its run; in the JSON form it has a key `run`, the name of the run folder.

    Watching goes on when the run is requeued or continues in a new job. The exit code is 0 when the run is done, or all
    runs of the sweep are, and 1 when one failed or was cancelled. The key q and Ctrl-C end the watching, not the run.
    Times of day are UTC, which the Z after them means.
    """
    clock, console = SystemClock(), Console()
    is_drawn = not as_json and console.is_terminal and not console.is_dumb_terminal
    try:
        if named.is_sweep:
            is_done = watch_sweep(named, clock, as_json, console if is_drawn else None)
        else:
            is_done = watch_run(named.folder, clock, as_json, console if is_drawn else None)
    except KeyboardInterrupt:
        name = named.folder.name
        click.echo(f"\nno longer watched; the run goes on (`hpctrain cancel {name}` stops it)", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_DONE if is_done else EXIT_FAILED)
