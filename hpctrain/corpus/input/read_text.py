"""Reads plain text: each file is a document. Parts of a file begin and end at line ends, so that several processes may
read one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from hpctrain.corpus.input.compressed_input import open_decompressed
from hpctrain.corpus.input.passages import NotTextError, Passage, cut
from hpctrain.corpus.input.work_units import FileRange

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_passages(piece: FileRange, size_bytes: int) -> Iterator[Passage]:
    """Yield the text in passages of at most `size_bytes`, cut at line ends where there are any.

    Raises:
        NotTextError: the file is binary or not UTF-8.
        OSError: the file cannot be read.
    """
    with open_decompressed(piece.path) as file:
        begin, to = part_of(file, piece.start, piece.stop)
        read = reader_of(file, begin, to)
        rest = read(size_bytes)
        if not begin:
            rest = rest.removeprefix(_BYTE_ORDER_MARK)
        while rest:
            rest += read(size_bytes - len(rest))
            stop = cut(rest) if len(rest) == size_bytes else len(rest)
            text, rest = _decode(rest[:stop]), rest[stop:] or read(size_bytes)
            yield Passage(text, stop, not rest)


def _decode(piece: bytes) -> str:
    if b"\0" in piece:
        raise NotTextError
    try:
        return piece.decode()
    except UnicodeDecodeError:
        raise NotTextError from None


_CHUNK_BYTES = 256 * 1024


def part_of(file: BinaryIO, start: int, stop: int | None) -> tuple[int, int | None]:
    """Return the byte range (from, to) of the lines that begin in [start, stop), and seek to `from`; a `to` of None is
    the end of the file."""
    to = None if stop is None else _line_start(file, stop)
    begin = _line_start(file, start) if start else 0
    if start or stop is not None:
        file.seek(begin)
    return begin, to


def reader_of(file: BinaryIO, begin: int, to: int | None) -> Callable[[int], bytes]:
    """Return a function that reads up to n bytes of the range [begin, to); it returns b'' at the end of the range."""
    if to is None:
        return file.read
    remaining_bytes = max(0, to - begin)

    def read(size: int) -> bytes:
        nonlocal remaining_bytes
        data = file.read(min(size, remaining_bytes))
        remaining_bytes -= len(data)
        return data

    return read


def _line_start(file: BinaryIO, position: int) -> int:
    """Return the offset of the first line that begins at `position` or after it."""
    file.seek(position - 1)
    while piece := file.readline(_CHUNK_BYTES):
        if piece.endswith(b"\n"):
            break
    return file.tell()
