"""Reads a part of an input file of any format as passages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpctrain.corpus.input.passages import Passage, cut_record
from hpctrain.corpus.input.read_columns import column_documents
from hpctrain.corpus.input.read_jsonl import jsonl_documents
from hpctrain.corpus.input.read_text import text_passages
from hpctrain.corpus.input.skipped import BadRecords
from hpctrain.corpus.input.work_units import FileRange

_DOCUMENTS: dict[str, Callable[[FileRange, str, BadRecords], Iterator[str]]] = {
    "jsonl": jsonl_documents,
    "parquet": column_documents,
    "arrow": column_documents,
}


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading input files."""

    size_bytes: int
    """Largest size of a passage."""
    text_field: str = "text"
    """Field or column that holds the text of a record."""
    skip_bad: bool = False
    """Whether records that cannot be used are skipped."""


def read_file_range(piece: FileRange, reading: ReadOptions, bad: BadRecords) -> Iterator[Passage]:
    """Yield the passages of a part of a file; an empty document has none.

    Raises:
        InputError: a record cannot be used and may not be skipped.
        NotTextError: a text file is binary or not UTF-8.
        OSError: the file cannot be read.
    """
    if piece.format == "text":
        yield from text_passages(piece, reading.size_bytes)
        return
    for number, text in enumerate(_DOCUMENTS[piece.format](piece, reading.text_field, bad)):
        try:
            yield from cut_record(text, reading.size_bytes)
        except UnicodeEncodeError:
            bad.add_bad(piece.path, "holds half a surrogate pair, which is no character", "document", number + 1)
