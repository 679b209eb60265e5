"""rich's console for text of any origin: what a view shows can be styled by hpctrain alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from hpctrain.base.control_characters import printable


def people_console(as_json: bool, piped_width: int) -> Console:
    """Where a command's words and tables go: to stderr beside a machine form; `piped_width` is for no terminal."""
    console = Console(stderr=as_json, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = piped_width
    return console


class Console(rich.console.Console):
    """A console whose views hold no control characters but those that rich itself puts around their pieces."""

    @property
    def file(self) -> IO[str]:
        """The stream behind every proxy: while a view is live, rich puts one before the filter of the whole process."""
        out = super().file
        while (behind := getattr(out, "rich_proxied_file", None)) is not None:
            out = behind
        return out

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of a view, each of them printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
