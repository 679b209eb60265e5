"""Makes text from files, logs, host names and other programs safe to print on a terminal.

A terminal obeys control characters: a log line or a folder's name could rewrite earlier lines, set the window's title,
or fill the clipboard. So every stream that people read is filtered here, whatever wrote to it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 but for tab and line feed, delete
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line breaks of Unicode, and what turns the direction of text
    "\ud800-\udfff]"  # bytes that are no text, as Python keeps them in the names of files
)


def printable(text: str) -> str:
    """Return the text without colours, and with every other control character escaped as in a Python string: \\x1b.

    Tabs and line feeds stay.
    """
    if _CONTROL.search(text) is None:
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _COLOUR.sub("", text.replace("\r\n", "\n")))


def first_control_character(text: str) -> str | None:
    """Return the first control character of a text that has to be one line, escaped as `printable` does; None if there
    is none."""
    match = _CONTROL.search(text) or re.search(r"[\t\n]", text)
    return ascii(match[0])[1:-1] if match else None


class EscapedStream:
    """A text stream that escapes every control sequence; `control` writes past it."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The underlying stream, under the name that rich looks for; hpctrain's rich views filter their text."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> object:
        if name == "buffer":  # bytes would go past the filter
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def control(out: TextIO, sequence: str) -> None:
    """Write a control sequence to the terminal, past the filter of an EscapedStream."""
    getattr(out, "rich_proxied_file", out).write(sequence)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what this process prints to stdout and stderr in the `with` block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EscapedStream(streams[0]), EscapedStream(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
