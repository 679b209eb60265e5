"""Output streams that escape what is unsafe on a terminal, or write the time before each line.

A terminal obeys control characters: a log line or a folder's name could rewrite earlier lines, set the window's title,
or fill the clipboard. So every stream that people read is filtered, whatever wrote to it. With the time before each
line, the logs of many processes can be merged.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import BinaryIO, TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 but for tab and line feed, delete
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line breaks of Unicode, and what turns the direction of text
    "\ud800-\udfff]"  # bytes that are no text, as Python keeps them in the names of files
)
_TIMESTAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ")


def printable(text: str) -> str:
    """Return the text without colours, and with every other control character escaped as in a Python string: \\x1b.
    Tabs and line feeds stay."""
    if _CONTROL.search(text) is None:
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _COLOUR.sub("", text.replace("\r\n", "\n")))


def first_control_character(text: str) -> str | None:
    """Return the first control character of a text that has to be one line, escaped as `printable` does; None if there
    is none."""
    match = _CONTROL.search(text) or re.search(r"[\t\n]", text)
    return ascii(match[0])[1:-1] if match else None


class EscapedStream:
    """A text stream that escapes control characters as `printable` does. The function `control` bypasses it."""

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
    """Write a control sequence to the terminal, past the filter if `out` is an EscapedStream."""
    getattr(out, "rich_proxied_file", out).write(sequence)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Escape control characters in what this process prints to stdout and stderr in the `with` block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EscapedStream(streams[0]), EscapedStream(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class TimestampedStream(io.TextIOWrapper):
    """A text stream that writes the UTC time before each line, and flushes each line as soon as it is whole.

    Only text that goes through Python gets a time; what libraries write to the descriptor stays as it is. Lines that do
    not fit on a full disk are lost: a log must not end the process that writes it.
    """

    def __init__(self, buffer: BinaryIO, wall: Callable[[], float]) -> None:
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._wall = wall
        self._at_start = True

    def write(self, text: str) -> int:
        """Write text with the UTC time before each of its lines; a line that a later call continues keeps the time of
        its beginning."""
        if text:
            lead = format_timestamp(self._wall())
            lines = _lines(text)
            first = lead + lines[0] if self._at_start else lines[0]
            with contextlib.suppress(OSError):
                super().write("".join([first, *(lead + line for line in lines[1:])]))
            self._at_start = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Write buffered text to the file; an error, such as a full disk, is ignored."""
        with contextlib.suppress(OSError):
            super().flush()


def timestamp_output(names: Sequence[str] = ("stdout", "stderr"), wall: Callable[[], float] = time.time) -> None:
    """Write the UTC time before each line that this process prints from now on to the streams `names` of `sys`; `wall`
    returns seconds since 1970."""
    for name in names:
        stream = getattr(sys, name)
        stream.flush()
        setattr(sys, name, TimestampedStream(stream.buffer, wall))


def format_timestamp(wall: float) -> str:
    """Return a time (seconds since 1970) as the text before a line: 0 -> '1970-01-01T00:00:00.000Z '."""
    text = datetime.fromtimestamp(wall, timezone.utc).isoformat(timespec="milliseconds")
    return f"{text.removesuffix('+00:00')}Z "


def parse_timestamp(line: bytes) -> tuple[float, bytes] | None:
    """Return the time at the beginning of a line, in seconds since 1970, and the rest of the line; None if it has no
    time."""
    stamp = _TIMESTAMP.match(line)
    if stamp is None:
        return None
    try:
        moment = datetime.fromisoformat(stamp[1].decode() + "+00:00")
    except ValueError:
        return None
    return moment.timestamp(), line[stamp.end() :]


def _lines(text: str) -> list[str]:
    """Return the lines of a text, with their line ends. Only line feeds end lines, because a progress bar's carriage
    returns begin no new line."""
    *whole, unfinished = text.split("\n")
    return [f"{line}\n" for line in whole] + ([unfinished] if unfinished else [])
