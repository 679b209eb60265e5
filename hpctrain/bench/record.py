"""The record that a bench writes: machine, versions, settings and rows."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import psutil

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.probe.system.host import cpu_name


def make_record(bench: str, rows: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a bench, as JSON values.

    Args:
        rows: dataclasses, one for each case.
    """
    record = machine_and_versions(bench, settings)
    return record | {"rows": [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]}


def machine_and_versions(bench: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a bench without its rows, as JSON values."""
    return {
        "bench": bench,
        "time": utc_text(time.time()),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "load_1min": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"hpctrain": __version__, "torch": version("torch"), "python": platform.python_version()},
        "settings": settings,
    }
