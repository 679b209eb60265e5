"""The JSON record that a bench returns: machine, versions, settings and rows. Also the file in which a long bench
stores its rows, so that it can continue after an interruption."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from hpctrain import __version__
from hpctrain.base.atomic import append_line, storage_errors
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import InputError
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.probe.system.host import cpu_name
from hpctrain.records.format.input_file import read_jsonl


def make_record(bench: str, rows: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a bench, as JSON values.

    Args:
        bench: name of the bench.
        rows: dataclasses, one for each case; fields that are None are left out.
    """
    record = machine_and_versions(bench, settings)
    return record | {"rows": [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]}


def machine_and_versions(bench: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the bench named `bench`, without its rows, as JSON values: name, time, machine, versions and
    the bench's settings."""
    return {
        "bench": bench,
        "time": utc_text(time.time()),
        "machine": {
            "cpu": cpu_name(),
            "cores": usable_cpus(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_1min": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"hpctrain": __version__, "torch": version("torch"), "python": platform.python_version()},
        "settings": settings,
    }


class RowStore:
    """Rows of a bench, measured with one set of settings, in a JSON-lines file. A bench that was interrupted reads them
    and continues. Without a path they exist only in memory."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read the rows in the file at `path`, or create the file. Without a path, begin without rows.

        Raises:
            InputError: the file cannot be read, or its rows were measured with other settings.
            StorageError: the folder or the file cannot be written.
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
        """Return the first row whose fields have these values; None when there is none."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and append it to the file if there is one.

        Raises:
            StorageError: the file cannot be written.
        """
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
