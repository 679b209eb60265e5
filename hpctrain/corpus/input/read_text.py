"""Plain text: each file is a document."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.corpus.input.compressed_input import open_decompressed
from hpctrain.corpus.input.passages import NotTextError, Passage, cut
from hpctrain.corpus.input.text_lines import part_of, reader_of
from hpctrain.corpus.input.work_units import FileRange

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_passages(piece: FileRange, size_bytes: int) -> Iterator[Passage]:
    """The text in passages of at most `size_bytes`, cut at line ends where there are any.

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
