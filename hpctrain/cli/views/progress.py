"""Progress of long work on stderr: a bar on a terminal, otherwise a line for each quarter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hpctrain.cli.views.console import Console


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with (phase, done, total) as the work proceeds, phase after phase."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase)
            bar.update(tasks[phase], completed=done, total=total)

        yield show


class _Lines:
    """Progress as a few plain lines, for log files."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_quarter: dict[str, int] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > self._last_quarter.get(phase, 0):
            self._last_quarter[phase] = quarter
            self._console.print(f"{phase}: {25 * quarter} %")
