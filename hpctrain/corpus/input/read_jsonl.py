"""Reads JSON lines: one object per line, with a document in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpctrain.base.units import format_si
from hpctrain.corpus.input.compressed_input import open_decompressed
from hpctrain.corpus.input.read_text import part_of
from hpctrain.corpus.input.skipped import RECORD_BYTES, BadRecords
from hpctrain.corpus.input.work_units import FileRange

LINE_BYTES = RECORD_BYTES


class _UnusableError(Exception):
    """A line without a document; the message says why."""


def jsonl_documents(piece: FileRange, field: str, bad: BadRecords) -> Iterator[str]:
    """Yield the document in the field `field` of each line.

    Raises:
        InputError: a line is not an object with that text, or the archive is damaged, and nothing may be skipped.
        OSError: the file cannot be read.
    """
    number = size = begin = 0
    before: int | None = None
    try:
        with open_decompressed(piece.path) as file:
            begin, to = part_of(file, piece.start, piece.stop)
            for line in _lines(file, begin, to):
                number += 1
                size += len(line)
                try:
                    text = _text(line, field)
                except _UnusableError as error:
                    # Lines before a part are counted only when a message needs their number.
                    before = _lines_before(piece.path, begin) if before is None else before
                    bad.add_bad(piece.path, str(error), "line", before + number)
                    continue
                yield text
    except OSError as error:
        if error.errno is not None:
            raise
        lost = f"{number:,} lines with {format_si(size, 'B')} come before it, what follows is lost"
        bad.add_damage(piece.path, f"{error}; {lost}", "line", number + 1)


def _lines(file: BinaryIO, begin: int, to: int | None) -> Iterator[bytes]:
    """Yield each line of the file in a byte range; a line that is too long is truncated, so it is not valid JSON."""
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
    """Return the document in a line; empty for an empty line.

    Raises:
        _UnusableError: the line has no document.
    """
    if not line.strip():
        return ""
    if len(line) >= LINE_BYTES:
        raise _UnusableError(f"the line is longer than {LINE_BYTES // 2**20} MiB")
    try:
        # Numbers stay text: only the text field matters, and Python itself writes NaN and numbers of any length.
        value = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "no text in UTF-8, or nested too deep"
        raise _UnusableError(f"not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise _UnusableError(f"found {type(value).__name__}, expected a JSON object a line")
    text = value.get(field)
    if not isinstance(text, str):
        known = ", ".join(name[:60] if name.isprintable() else repr(name[:60]) for name in list(value)[:8]) or "none"
        raise _UnusableError(f"found no text in the field {field!r} (its fields: {known}); name one with --text-field")
    return text


def _lines_before(path: Path, begin: int) -> int:
    """Return the number of line ends in the first `begin` bytes of a file."""
    count = 0
    if begin:
        with path.open("rb") as file:
            while begin > 0 and (data := file.read(min(begin, 2**20))):
                count += data.count(b"\n")
                begin -= len(data)
    return count
