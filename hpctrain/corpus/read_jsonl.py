"""JSON lines: an object a line, one field of which is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpctrain.corpus.lines import part_of
from hpctrain.corpus.packed import unpacked
from hpctrain.corpus.pieces import Piece
from hpctrain.corpus.records import RECORD_BYTES, BadRecords
from hpctrain.records.json_text import JsonError, parse_json

LINE_BYTES = RECORD_BYTES


class _UnusableError(Exception):
    """A line that holds no document; its text says why."""


def jsonl_documents(piece: Piece, field: str, bad: BadRecords) -> Iterator[str]:
    """The text of each line's field.

    Raises:
        InputError: a line is no object with that text, or the archive is damaged, and nothing may be left out.
        OSError: the file cannot be read.
    """
    number = begin = 0
    try:
        with unpacked(piece.path) as file:
            begin, to = part_of(file, piece.start, piece.stop)
            for line in _lines(file, begin, to):
                number += 1
                try:
                    text = _text(line, field)
                except _UnusableError as error:
                    bad.found(_place(piece.path, begin, number), str(error))
                    continue
                yield text
    except OSError as error:
        if error.errno is not None:
            raise
        bad.found(_place(piece.path, begin, number + 1), str(error))


def _lines(file: BinaryIO, begin: int, to: int | None) -> Iterator[bytes]:
    """Each line; of one that is too long only the beginning, which is no JSON."""
    position = begin
    while to is None or position < to:
        line = rest = file.readline(LINE_BYTES)
        if not line:
            return
        position += len(line)
        while len(rest) == LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES)
            position += len(rest)
        yield line


def _text(line: bytes, field: str) -> str:
    """The document in a line; empty for an empty line.

    Raises:
        _UnusableError: there is none.
    """
    if not line.strip():
        return ""
    if len(line) >= LINE_BYTES:
        raise _UnusableError(f"the line is longer than {LINE_BYTES // 2**20} MiB")
    try:
        value = parse_json(line)
    except JsonError as error:
        raise _UnusableError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _UnusableError(f"found {type(value).__name__}, expected a JSON object a line")
    text = value.get(field)
    if not isinstance(text, str):
        known = ", ".join(name[:60] if name.isprintable() else repr(name[:60]) for name in list(value)[:8]) or "none"
        raise _UnusableError(f"found no text in the field {field!r} (its fields: {known}); name one with --text-field")
    return text


def _place(path: Path, begin: int, number: int) -> str:
    """'file:line'; lines before a part are counted only when there is something to tell."""
    before = 0
    if begin:
        with path.open("rb") as file:
            while begin > 0 and (data := file.read(min(begin, 2**20))):
                before += data.count(b"\n")
                begin -= len(data)
    return f"{path}:{before + number}"
