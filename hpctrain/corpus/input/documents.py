"""Reads a part of an input file as passages: plain text, JSON lines, Parquet, or the Arrow files of Hugging Face
`datasets`.

A text file is one document. In a file of JSON lines each line is a document, and in a table each row. A part of a file
of lines begins and ends at line ends, so that several processes may read parts of one file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_si
from hpctrain.corpus.input.compressed_input import open_decompressed, open_plain
from hpctrain.corpus.input.inputs import FileRange
from hpctrain.corpus.input.passages import NotTextError, Passage, cut, cut_record
from hpctrain.corpus.input.skipped import RECORD_BYTES, BadRecords

BATCH_ROWS = 128
"""Rows of a table that are converted to Python strings together."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class ReadOptions:
    """How input files are read."""

    size_bytes: int
    """Largest size of a passage (a document, or a piece of a long document), in bytes."""
    text_field: str = "text"
    """JSON field or table column that holds the text of a document."""
    skip_bad: bool = False
    """Whether documents that cannot be used are skipped; else the first one raises an InputError."""


def read_file_range(piece: FileRange, reading: ReadOptions, bad: BadRecords) -> Iterator[Passage]:
    """Yield the passages of a part of a file; an empty document has none.

    Args:
        piece: the file, or the part of it.
        reading: size of passages and name of the field or column; `skip_bad` is not used.
        bad: receives each line, row or document that cannot be used, and the file if it is a damaged one of lines or
            rows. Its `add` raises the InputError if nothing may be skipped.

    Raises:
        InputError: a line, row or document cannot be used, or a file of lines or rows is damaged, and `bad` skips
            nothing; or a table does not have exactly one column with the wanted name, or this column holds no text.
        NotTextError: a text file is binary or not UTF-8, whatever `bad` skips. Passages before the place were yielded.
        OSError: the file cannot be read; or a text file is compressed, and is damaged or expands too much.
    """
    if piece.format == "text":
        yield from _text_passages(piece, reading.size_bytes)
        return
    documents = _json_lines if piece.format == "jsonl" else _rows
    for number, text in enumerate(documents(piece, reading.text_field, bad)):
        try:
            yield from cut_record(text, reading.size_bytes)
        except UnicodeEncodeError:
            bad.add(piece.path, "holds half a surrogate pair, which is no character", "document", number + 1)


def _text_passages(piece: FileRange, size_bytes: int) -> Iterator[Passage]:
    """Yield the text of a part of a text file in passages of at most `size_bytes`, cut at line ends where there are
    any.

    Raises:
        NotTextError: the file is binary or not UTF-8; passages before the place were yielded.
        OSError: the file cannot be read, or its compressed text is damaged or expands too much.
    """
    with open_decompressed(piece.path) as file:
        begin, to = _part_of(file, piece.start, piece.stop)
        read = _reader_of(file, begin, to)
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


def _part_of(file: BinaryIO, start: int, stop: int | None) -> tuple[int, int | None]:
    """Return the byte range (begin, end) of the lines that begin in [start, stop), and seek to its begin. An end of
    None is the end of the file."""
    to = None if stop is None else _line_start(file, stop)
    begin = _line_start(file, start) if start else 0
    if start or stop is not None:
        file.seek(begin)
    return begin, to


def _reader_of(file: BinaryIO, begin: int, to: int | None) -> Callable[[int], bytes]:
    """Return a function that takes a number n and reads up to n bytes of the byte range [begin, to); at the end of the
    range it returns b''."""
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


def _json_lines(piece: FileRange, field: str, bad: BadRecords) -> Iterator[str]:
    """Yield the document in the field `field` of each line of a part of a file of JSON lines.

    Raises:
        InputError: a line is no object with text in that field, or the compressed file is damaged, and nothing may be
            skipped.
        OSError: the file cannot be read.
    """
    number = size = begin = 0
    before: int | None = None
    try:
        with open_decompressed(piece.path) as file:
            begin, to = _part_of(file, piece.start, piece.stop)
            for line in _lines(file, begin, to):
                number += 1
                size += len(line)
                try:
                    text = _text(line, field)
                except ValueError as error:
                    # Lines before a part are counted only when a message needs their number.
                    before = _lines_before(piece.path, begin) if before is None else before
                    bad.add(piece.path, str(error), "line", before + number)
                    continue
                yield text
    except OSError as error:
        if error.errno is not None:
            raise
        lost = f"{number:,} lines with {format_si(size, 'B')} come before it, what follows is lost"
        bad.add(piece.path, f"{error}; {lost}", "line", number + 1, damaged=True)


def _lines(file: BinaryIO, begin: int, to: int | None) -> Iterator[bytes]:
    """Yield each line of the byte range [begin, to). A line of more than RECORD_BYTES is truncated, so it is not valid
    JSON."""
    position = begin
    while to is None or position < to:
        line = rest = file.readline(RECORD_BYTES)
        if not line:
            return
        position += len(line)
        while len(rest) == RECORD_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(RECORD_BYTES)
            position += len(rest)
        yield line


def _text(line: bytes, field: str) -> str:
    """Return the document in the field `field` of a JSON line; '' for an empty line.

    Raises:
        ValueError: the line is too long, no JSON object, or has no text in the field.
    """
    if not line.strip():
        return ""
    if len(line) >= RECORD_BYTES:
        raise ValueError(f"the line is longer than {RECORD_BYTES // 2**20} MiB")
    try:
        # Numbers stay text: only the text field matters, and Python itself writes NaN and numbers of any length.
        value = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "no text in UTF-8, or nested too deep"
        raise ValueError(f"not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a JSON object a line")
    text = value.get(field)
    if not isinstance(text, str):
        known = ", ".join(name[:60] if name.isprintable() else repr(name[:60]) for name in list(value)[:8]) or "none"
        raise ValueError(f"found no text in the field {field!r} (its fields: {known}); name one with --text-field")
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


def _rows(piece: FileRange, field: str, bad: BadRecords) -> Iterator[str]:
    """Yield the documents in the column `field` of a part of a Parquet or Arrow file, read one batch at a time.

    Raises:
        InputError: the file has no such column; or it has another format or is damaged, or a row has no text, and
            nothing may be skipped.
        OSError: the file cannot be read.
    """
    import pyarrow as pa

    batches = _parquet_batches if piece.format == "parquet" else _arrow_batches
    count = 0
    try:
        with open_plain(piece.path) as raw:
            for text in _texts(batches(raw, piece, field), piece.path, bad):
                count += 1
                yield text
    except (pa.ArrowException, UnicodeDecodeError, MemoryError) as error:  # a damaged file may claim any size
        line = str(error).strip().partition("\n")[0][:200]
        shown = "".join(character for character in line if character.isprintable())
        lost = f"; {count:,} rows come before it, what follows is lost" if count else ""
        bad.add(piece.path, f"damaged, or no {piece.format.capitalize()} file: {shown}{lost}", damaged=True)


def _parquet_batches(raw: BinaryIO, piece: FileRange, field: str) -> Iterator[tuple[int, Any]]:
    """Yield (number of the batch's first row, text column) for each batch of rows in a part of a Parquet file. The
    first row of the file is 0."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(raw, pre_buffer=False) as file:
        _check_column(piece.path, file.schema_arrow, field)
        stop = file.num_row_groups if piece.stop is None else piece.stop
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        groups = range(piece.start, stop)
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=[field], use_threads=False):
            yield row, batch.column(0)
            row += batch.num_rows


def _arrow_batches(raw: BinaryIO, piece: FileRange, field: str) -> Iterator[tuple[int, Any]]:
    """Yield (number of the batch's first row, text column) for each batch of rows of an Arrow file, in stream format
    (`datasets`) or file format (Feather). The first row of the file is 0."""
    import pyarrow as pa

    row = 0
    with pa.PythonFile(raw, "r") as file:
        of_file_format = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if of_file_format else pa.ipc.open_stream(file)
        _check_column(piece.path, reader.schema, field)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if of_file_format else reader
        for batch in batches:
            for first in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.select([field]).slice(first, BATCH_ROWS)
                yield row, part.column(0)
                row += part.num_rows


def row_groups(path: Path) -> list[int]:
    """Return the uncompressed bytes of each row group of a Parquet file, in order. The list is empty if the file cannot
    be read; the error is reported later, when the rows are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_plain(path) as raw, pq.ParquetFile(raw) as file:
            return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except (pa.ArrowException, OSError):
        return []


def _texts(batches: Iterator[tuple[int, Any]], path: Path, bad: BadRecords) -> Iterator[str]:
    for first, column in batches:
        column.validate(full=True)  # a damaged file may have offsets far outside of its text, which would crash
        for row, text in enumerate(column.to_pylist(), first + 1):
            if text is None:
                bad.add(path, "found no text", "row", row)
            elif len(text) > RECORD_BYTES:
                bad.add(path, f"the text is longer than {RECORD_BYTES // 2**20} MiB", "row", row)
            else:
                yield text


def _check_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow as pa

    if schema.names.count(field) != 1:
        known = ", ".join(name if name.isprintable() else repr(name) for name in schema.names[:8]) or "none"
        often = "more than one" if field in schema.names else "no"
        raise InputError(f"{path}: found {often} column {field!r}; its columns: {known}; name one with --text-field")
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{path}: the column {field!r} holds {kind}, expected text; name another with --text-field")
