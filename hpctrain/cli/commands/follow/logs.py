"""`hpctrain logs RUN`: print the output of a run's processes as one log."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.cli.views.run_status import WatchedRun
from hpctrain.report.event_text import log_line_text
from hpctrain.report.logs import LogLine, find_logs, follow_lines, last_lines

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
def command(folder: Path, follow: bool, rank: int | None, node: str | None, attempt: int | None, lines: int) -> None:
    """Print the end of the logs of a run, merged by time: logs of the job script, the agents and the workers.

    RUN is a run folder, a run's name or a job's id. Each line begins with its time (UTC) and the name of its log in
    RUN/logs: 0/node1.0 is the first worker of node1 in attempt 0, 7.node1.agent is the agent of node1 in job 7.
    Libraries print lines without a time; such a line follows the line before it in its log. Lines of srun and Slurm in
    the log of a job script have no time either; they stand before the next line with a time, or at the end. Events are
    printed as sentences.
    """
    find = partial(find_logs, folder, node, rank, attempt)
    files = find()
    if not files and not follow:
        raise InputError(f"{folder.name}: no log of that kind in {folder / 'logs'}")
    readers, shown = last_lines(files, lines or None, rest=not follow)
    for line in shown:
        click.echo(_text(line))
    if not follow:
        return
    clock = SystemClock()
    watched = WatchedRun(folder, clock)
    try:
        for line in follow_lines(readers, find, clock, lambda: watched.is_over(watched.look())):
            click.echo(_text(line))
    except KeyboardInterrupt:
        click.echo(f"\nno longer followed; the run goes on: `hpctrain logs -f {folder.name}`", err=True)
        return
    status = watched.look()
    click.echo(f"{status.name}: {status.state} - {status.reason}", err=True)


def _text(line: LogLine) -> str:
    moment = datetime.fromtimestamp(line.time_s, timezone.utc)
    return f"{moment:%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d} {line.source} | {log_line_text(line.text)}"
