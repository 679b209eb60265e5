"""Parts of a file that begin and end at line ends, so that several processes may read one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

_CHUNK_BYTES = 256 * 1024


def part_of(file: BinaryIO, start: int, stop: int | None) -> tuple[int, int | None]:
    """Byte range (from, to) of the lines that begin in [start, stop); `to` None: the end. Seeks to `from`."""
    to = None if stop is None else _line_start(file, stop)
    begin = _line_start(file, start) if start else 0
    if start or stop is not None:
        file.seek(begin)
    return begin, to


def reader_of(file: BinaryIO, begin: int, to: int | None) -> Callable[[int], bytes]:
    """Return a function that reads up to n bytes of that range; b'' at its end."""
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
    """Offset of the first line that begins at `position` or after it."""
    file.seek(position - 1)
    while piece := file.readline(_CHUNK_BYTES):
        if piece.endswith(b"\n"):
            break
    return file.tell()
