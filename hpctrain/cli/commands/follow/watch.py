"""`hpctrain watch RUN`: show a run on the terminal until it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.live import Live

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import EXIT_DONE, EXIT_FAILED
from hpctrain.cli.answers import say
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.cli.views.console import Console
from hpctrain.cli.views.run_status import WatchedRun
from hpctrain.report.status import RunStatus
from hpctrain.report.terminal import PlainView, render_watch_view
from hpctrain.runs.locate import job_id

LOOK_S = 1.0
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it; it says nothing about the run's end."""


@click.command()
@click.argument("folder", metavar="RUN", type=RUN)
def command(folder: Path) -> None:
    """Watch a run until it ends: state, step, loss, nodes, the last event, and the reason why the run waits.

    RUN is a run folder, a run's name or a job's id. On a terminal the view is redrawn in place; elsewhere each change
    is a line. Watching goes on when the run is requeued or continues in a new job. The exit code is 0 when the run is
    done, 1 when it failed or was cancelled. Ctrl-C ends the watching, not the run. Times of day are UTC, which the Z
    after them means.
    """
    clock, console = SystemClock(), Console()
    watched = WatchedRun(folder, clock)
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            status = _draw_until_over(watched, clock, console)
        else:
            plain = PlainView()
            status = _show_until_over(watched, clock, lambda now: say(plain.lines(now, watched.new, clock.wall())))
    except KeyboardInterrupt:
        click.echo(f"\nno longer watched; the run goes on (`hpctrain cancel {folder.name}` stops it)", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_DONE if status.state == "done" else EXIT_FAILED)


def _draw_until_over(watched: WatchedRun, clock: Clock, console: Console) -> RunStatus:
    with Live(console=console, auto_refresh=False) as live:

        def draw(status: RunStatus) -> None:
            view = render_watch_view(status, watched.live.events, job_id(watched.live.folder), clock.wall())
            live.update(view, refresh=True)

        return _show_until_over(watched, clock, draw)


def _show_until_over(watched: WatchedRun, clock: Clock, show: Callable[[RunStatus], None]) -> RunStatus:
    while True:
        status = watched.look()
        show(status)
        if watched.is_over(status):
            return status
        clock.sleep(LOOK_S)
