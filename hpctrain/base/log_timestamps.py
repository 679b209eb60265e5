"""Output with the time at which each line began, so that the logs of many processes can be merged."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import BinaryIO

_TIMESTAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ")


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
        """Write text of any number of lines; a line that is continued later keeps the time of its beginning."""
        if text:
            lead = format_timestamp(self._wall())
            lines = _lines(text)
            first = lead + lines[0] if self._at_start else lines[0]
            with contextlib.suppress(OSError):
                super().write("".join([first, *(lead + line for line in lines[1:])]))
            self._at_start = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Write buffered text to the file."""
        with contextlib.suppress(OSError):
            super().flush()


def timestamp_output(names: Sequence[str] = ("stdout", "stderr"), wall: Callable[[], float] = time.time) -> None:
    """Write the UTC time before each line that this process prints to the named streams from now on."""
    for name in names:
        stream = getattr(sys, name)
        stream.flush()
        setattr(sys, name, TimestampedStream(stream.buffer, wall))


def format_timestamp(wall: float) -> str:
    """Return a time (seconds since 1970) as the text before a line: 0 -> '1970-01-01T00:00:00.000Z '."""
    text = datetime.fromtimestamp(wall, timezone.utc).isoformat(timespec="milliseconds")
    return f"{text.removesuffix('+00:00')}Z "


def parse_timestamp(line: bytes) -> tuple[float, bytes] | None:
    """Return a line's time, in seconds since 1970, and the line without it; None for a line that has none."""
    stamp = _TIMESTAMP.match(line)
    if stamp is None:
        return None
    try:
        moment = datetime.fromisoformat(stamp[1].decode() + "+00:00")
    except ValueError:
        return None
    return moment.timestamp(), line[stamp.end() :]


def _lines(text: str) -> list[str]:
    """Return the lines of a text. Only line feeds end them: a progress bar's carriage returns begin no line."""
    *whole, unfinished = text.split("\n")
    return [f"{line}\n" for line in whole] + ([unfinished] if unfinished else [])
