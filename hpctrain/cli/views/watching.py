"""A run or a sweep over time, for `hpctrain watch`: drawn on a terminal, as lines, or as JSON."""

from __future__ import annotations

import locale
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from hpctrain.base.clock import Clock
from hpctrain.cli.answers import print_json, say
from hpctrain.cli.views.console import Console
from hpctrain.cli.views.keys import pressed_keys
from hpctrain.jobs.run_status import WatchedRun, WatchedSweep
from hpctrain.report.status import RunStatus
from hpctrain.report.terminal import status_lines
from hpctrain.report.watch.changes import JsonView, PlainView
from hpctrain.report.watch.run_view import WatchedFigures, run_view
from hpctrain.report.watch.sweep_view import sweep_view
from hpctrain.report.watch.text_fit import Screen
from hpctrain.runs.locate import job_id, run_name
from hpctrain.runs.sweeps import NamedRuns

LOOK_S = 1.0
"""Seconds between two looks at the files."""


def watch_run(folder: Path, clock: Clock, as_json: bool, console: Console | None) -> bool:
    """Watch a run until it is over, and return whether it is done.

    Args:
        as_json: without a terminal, print what changes as JSON values, one a line.
        console: terminal to draw on; None: print what changes.

    Raises:
        KeyboardInterrupt: a person pressed q or Ctrl-C.
    """
    watched = WatchedRun(folder, clock)
    if console is not None:
        status = watched.look()

        def draw(screen: Screen) -> tuple[list[Text], bool]:
            nonlocal status
            status = watched.look()
            figures = WatchedFigures(watched.live, status, watched.job, job_id(folder), clock.wall())
            return run_view(figures, screen), watched.is_over(status)

        _draw_until_over(draw, clock, console)
        say(status_lines(status, clock.wall()))
        return status.state == "done"
    changes, plain = JsonView(), PlainView()
    while True:
        status = watched.look()
        if as_json:
            _print_each(changes.values(status, watched.new))
        else:
            say(plain.lines(status, watched.new, clock.wall()))
        if watched.is_over(status):
            return status.state == "done"
        clock.sleep(LOOK_S)


def watch_sweep(named: NamedRuns, clock: Clock, as_json: bool, console: Console | None) -> bool:
    """Watch a sweep until all its runs are over, and return whether all are done. The arguments are as of `watch_run`,
    and so is KeyboardInterrupt."""
    watched = WatchedSweep(named.runs, clock)
    statuses: list[RunStatus] = []
    if console is not None:

        def draw(screen: Screen) -> tuple[list[Text], bool]:
            statuses[:] = watched.look()
            view = sweep_view(run_name(named.folder.name), list(zip(watched.runs, statuses, strict=True)), screen)
            return view, watched.is_over()

        _draw_until_over(draw, clock, console)
        say([line for status in statuses for line in status_lines(status, clock.wall())[:1]])
        return all(status.state == "done" for status in statuses)
    views = [(JsonView(), PlainView()) for _ in watched.runs]
    while True:
        statuses = watched.look()
        for live, (changes, plain), status, new in zip(watched.runs, views, statuses, watched.new, strict=True):
            if as_json:
                _print_each({"run": live.folder.name, **value} for value in changes.values(status, new))
            else:
                say([f"{status.name}  {line}" for line in plain.lines(status, new, clock.wall())])
        if watched.is_over():
            return all(status.state == "done" for status in statuses)
        clock.sleep(LOOK_S)


def _print_each(values: Iterable[dict[str, Any]]) -> None:
    for value in values:
        print_json(value)


def _draw_until_over(draw: Callable[[Screen], tuple[list[Text], bool]], clock: Clock, console: Console) -> None:
    """Draw a view on the whole terminal once a second until what it shows is over or a person presses q.

    Args:
        draw: returns the lines of the view, and whether the run or the sweep is over.

    Raises:
        KeyboardInterrupt: a person pressed q or Ctrl-C.
    """
    # A locale without UTF-8 makes Python write UTF-8 nevertheless, which such a terminal does not show.
    ascii_only = not all("utf" in name.lower() for name in (console.encoding, locale.nl_langinfo(locale.CODESET)))
    with pressed_keys(clock) as wait, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            lines, is_over = draw(Screen(console.width, console.height, ascii_only))
            live.update(Group(*lines), refresh=True)
            if is_over:
                return
            if "q" in wait(LOOK_S).lower():
                raise KeyboardInterrupt
