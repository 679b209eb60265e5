"""Text that comes out of files, logs, host names and other programs, as a terminal may be given it.

A terminal obeys what it is sent: a log line or a folder's name could rewrite what stands above it, set the window's
title, or fill the clipboard. So every stream that people read passes through here, whatever wrote to it.
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
    """The text with colours left out and every other control character written as a Python string has it: \\x1b.

    Tabs and line feeds stay.
    """
    if _CONTROL.search(text) is None:
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _COLOUR.sub("", text.replace("\r\n", "\n")))


def first_control_character(text: str) -> str | None:
    """The first control character of a text that has to be one line, as `printable` writes it; None: there is none."""
    match = _CONTROL.search(text) or re.search(r"[\t\n]", text)
    return ascii(match[0])[1:-1] if match else None


class EscapedStream:
    """A text stream that passes on nothing that a terminal would obey, but for `control`."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream behind, by the name under which rich looks for it: its views filter each piece of text."""

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
    """Write a sequence that the terminal is to obey."""
    getattr(out, "rich_proxied_file", out).write(sequence)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """While it holds, what this process prints is printable."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EscapedStream(streams[0]), EscapedStream(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
