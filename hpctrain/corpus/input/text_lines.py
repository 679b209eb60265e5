"""A part of a file that begins and ends at line ends, so that several processes may read one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

_CHUNK_BYTES = 256 * 1024


def part_of(file: BinaryIO, start: int, stop: int | None) -> tuple[int, int | None]:
    """The bytes of the lines that begin in [start, stop): from, to (None: to the end). The file is left at `from`."""
    to = None if stop is None else _line_start(file, stop)
    begin = _line_start(file, start) if start else 0
    if start or stop is not None:
        file.seek(begin)
    return begin, to


def reader_of(file: BinaryIO, begin: int, to: int | None) -> Callable[[int], bytes]:
    """A function that reads up to n bytes of that part; b'' at its end."""
    if to is None:
        return file.read
    left = max(0, to - begin)

    def read(size: int) -> bytes:
        nonlocal left
        data = file.read(min(size, left))
        left -= len(data)
        return data

    return read


def _line_start(file: BinaryIO, position: int) -> int:
    """Where the first line begins that begins at `position` or behind it."""
    file.seek(position - 1)
    while piece := file.readline(_CHUNK_BYTES):
        if piece.endswith(b"\n"):
            break
    return file.tell()
