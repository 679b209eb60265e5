"""rich's console, made safe for text of any origin: it escapes control characters. Also the progress of long work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from hpctrain.base.output_streams import printable

PIPE_WIDTH = 120
"""Columns of a table that is not printed on a terminal."""


class Console(rich.console.Console):
    """A console that prints no control characters except those that rich adds for style."""

    @property
    def file(self) -> IO[str]:
        """The stream that the console writes to: hpctrain's `EscapedStream`, which escapes control characters, or a
        plain stream.

        While a live view is shown, rich puts proxies before the stream, which must be skipped.
        """
        out = super().file
        while (behind := getattr(out, "rich_proxied_file", None)) is not None:
            out = behind
        return out

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a view with unprintable characters escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def table_console(stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> Console:
    """Return a console for wide tables.

    Args:
        stderr: print on stderr instead of stdout.
        pipe_width: columns of the console where it prints to no terminal; a row of up to that width stays on one line.
    """
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = pipe_width
    return console


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the progress of work on stderr: a bar for each phase on a terminal, else lines at 25,
    50, 75 and 100 %.

    The function is called with the phase's name, and how much of it is done and planned.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last_quarter: dict[str, int] = {}

        def print_quarter(phase: str, done: int, total: int) -> None:
            quarter = 4 * done // max(1, total)
            if quarter > last_quarter.get(phase, 0):
                last_quarter[phase] = quarter
                console.print(f"{phase}: {25 * quarter} %")

        yield print_quarter
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase)
            bar.update(tasks[phase], completed=done, total=total)

        yield show
