"""Rows of a long bench in a file. Each row is written as soon as it is measured, so that an interrupted bench
resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import append_line, storage_errors
from hpctrain.base.errors import InputError
from hpctrain.records.format.input_file import read_jsonl


class RowStore:
    """Rows measured with one set of settings; without a path they exist only in memory."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read the rows in the file, or create it.

        Raises:
            InputError: the rows in the file were measured with other settings.
            StorageError: the folder cannot be written.
        """
        self._path = path
        self.rows: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))  # normalised as JSON returns it: tuples become lists
        lines = read_jsonl(path, owned=False) if path is not None else []
        if lines:
            self._check(lines[0].get("settings", {}), settings)
            self.rows = lines[1:]
        elif path is not None:
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, json.dumps({"settings": settings}))

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the first row with these values, or None."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; on return it is in the file."""
        if self._path is not None:
            append_line(self._path, json.dumps(row, allow_nan=False))
        self.rows.append(row)

    def _check(self, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise InputError(
                    f"{self._path}: its rows were measured with {name} = {stored.get(name)!r}, now asked for is "
                    f"{wanted.get(name)!r}; give the same settings, or another folder"
                )
