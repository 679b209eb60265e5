"""rich's console for text of any origin: only hpctrain styles what a view shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from hpctrain.base.control_characters import printable

PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""


class Console(rich.console.Console):
    """A console that prints no control characters except those that rich itself puts around its pieces."""

    @property
    def file(self) -> IO[str]:
        """The stream behind every proxy: while a view is live, rich puts a proxy before the filter of this process."""
        out = super().file
        while (behind := getattr(out, "rich_proxied_file", None)) is not None:
            out = behind
        return out

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a view; each of them is printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def table_console(stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> Console:
    """Return a console for wide tables. A pipe has no width of its own; a row of `pipe_width` stays a line there."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = pipe_width
    return console
