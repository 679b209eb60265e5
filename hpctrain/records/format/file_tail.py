"""Reads a file of JSON lines while it is being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.base.errors import FileError
from hpctrain.base.owned_files import open_owned
from hpctrain.records.format.document import Document
from hpctrain.records.format.input_file import parse_json_line

SAMPLED_LINE_BYTES = 1 << 16
"""Longest line that `sampled_values` returns; longer ones are left out."""

RecordT = TypeVar("RecordT", bound=Document)


class FileTail:
    """Reads the complete lines that were appended to a file of JSON lines since the last call of `values`.

    A line whose end is not yet written is read later.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None, call_bytes: int | None = None) -> None:
        """Prepare to read.

        Args:
            limit_bytes: most bytes that the first call reads, counted from the end of the file; None: all.
            call_bytes: most bytes that any call reads, so that the file is read over several calls; None: all.
        """
        self.is_at_end = True
        """Whether the last call read all that the file had."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._call_bytes = call_bytes
        self._offset = 0
        self._rest = b""

    def values(self) -> list[Any]:
        """Return the JSON object of each new line; [] if the file cannot be read. A line that is no complete JSON
        object is left out: its writer may have died.

        Raises:
            UntrustedError: another user owns the file or its folder, or can write to it.
        """
        try:
            with os.fdopen(open_owned(self.path), "rb") as file:
                if self._limit_bytes is not None:
                    self._offset = max(0, os.fstat(file.fileno()).st_size - self._limit_bytes)
                    self._limit_bytes = None
                file.seek(self._offset)
                data = file.read() if self._call_bytes is None else file.read(self._call_bytes)
                self.is_at_end = file.tell() >= os.fstat(file.fileno()).st_size
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [value for line in lines if (value := parse_json_line(line)) is not None]


def rows_of(kind: type[RecordT], values: list[Any]) -> Iterator[RecordT]:
    """Yield the records of type `kind` that the JSON values hold; values that this version of hpctrain cannot read are
    left out."""
    for value in values:
        try:
            yield kind.from_json(value)
        except FileError:
            continue


def sampled_values(path: Path, count: int, spare_bytes: int) -> list[dict[str, Any]]:
    """Return the JSON objects of at most `count` lines of a file of this user, from evenly spaced places before its
    last `spare_bytes`, in order; [] if the file has no more bytes than these, or cannot be read. However large the file
    is, at most `count` times twice `SAMPLED_LINE_BYTES` are read.

    Raises:
        UntrustedError: another user owns the file or its folder, or can write to it.
    """
    values: dict[int, dict[str, Any] | None] = {}
    try:
        with os.fdopen(open_owned(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size - spare_bytes
            for index in range(count if size > 0 else 0):
                file.seek(index * size // count)
                if index:
                    file.readline(SAMPLED_LINE_BYTES)  # the end of a line whose beginning is before this place
                values[file.tell()] = parse_json_line(file.readline(SAMPLED_LINE_BYTES))
    except OSError:
        return []
    return [value for value in values.values() if value is not None]
