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

RecordT = TypeVar("RecordT", bound=Document)


class FileTail:
    """Reads the complete lines that were appended to a file of JSON lines since the last call of `values`.

    A line whose end is not yet written is read later.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """Prepare to read.

        Args:
            limit_bytes: most bytes that the first call reads, counted from the end of the file; None: all.
        """
        self._path = path
        self._limit_bytes = limit_bytes
        self._offset = 0
        self._rest = b""

    def values(self) -> list[Any]:
        """Return the JSON value of each new line; [] if the file cannot be read. A line that is cut short, because its
        writer died, is left out.

        Raises:
            UntrustedError: another user owns the file or its folder, or can write to it.
        """
        try:
            with os.fdopen(open_owned(self._path), "rb") as file:
                if self._limit_bytes is not None:
                    self._offset = max(0, os.fstat(file.fileno()).st_size - self._limit_bytes)
                    self._limit_bytes = None
                file.seek(self._offset)
                data = file.read()
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
