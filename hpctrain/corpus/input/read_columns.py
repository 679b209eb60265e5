"""Reads tables on disk: Parquet, and the Arrow files that Hugging Face `datasets` saves. Each row is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.compressed_input import open_plain
from hpctrain.corpus.input.skipped import RECORD_BYTES, BadRecords
from hpctrain.corpus.input.work_units import FileRange

BATCH_ROWS = 128
"""Rows converted to Python text at once."""


def column_documents(piece: FileRange, field: str, bad: BadRecords) -> Iterator[str]:
    """Yield the documents in the text column of a part of a Parquet or Arrow file, read one batch at a time.

    Raises:
        InputError: the file has another format, has no such column, or a row without text may not be skipped.
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
        _damaged(piece, error, count, bad)


def _parquet_batches(raw: BinaryIO, piece: FileRange, field: str) -> Iterator[tuple[int, Any]]:
    """Yield (number of its first row, text column) for each batch of a part's row groups in a Parquet file."""
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
    """Yield (number of its first row, text column) for each batch of an Arrow file, in stream format (`datasets`) or
    file format (Feather)."""
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
    """Return the bytes of each row group of a Parquet file; empty if the file cannot be read, which is reported when
    its rows are read."""
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
                bad.add_bad(path, "found no text", "row", row)
            elif len(text) > RECORD_BYTES:
                bad.add_bad(path, f"the text is longer than {RECORD_BYTES // 2**20} MiB", "row", row)
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


def _damaged(piece: FileRange, error: Exception, count: int, bad: BadRecords) -> None:
    """Count a file as damaged from a row on."""
    line = str(error).strip().partition("\n")[0][:200]
    shown = "".join(character for character in line if character.isprintable())
    lost = f"; {count:,} rows come before it, what follows is lost" if count else ""
    bad.add_damage(piece.path, f"damaged, or no {piece.format.capitalize()} file: {shown}{lost}")
