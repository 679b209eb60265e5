"""The metrics of a run as columns: one array for each figure, with one element for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.records.history.run_log import MetricRow

INTEGERS = ("step", "generation", "tokens", "samples")
"""Figures that every row has, as whole numbers."""


def metric_columns(rows: Sequence[MetricRow]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the figures of metrics rows as columns: name -> array of shape (number of rows,).

    A figure with parts gives a column for each part: `bytes_sent.dp`, and for lists by position `stage_time_s.0`. The
    columns in `INTEGERS` have dtype int64, `skipped` has bool, and all others have float64, with NaN in rows without
    the figure. A figure that no row has gives no column.

    Args:
        rows: rows of metrics.jsonl.
    """
    flat = [row.figures() for row in rows]
    names = dict.fromkeys(name for figures in flat for name in figures)
    return {name: _column(name, [figures.get(name) for figures in flat]) for name in names}


def _column(name: str, values: list[float | int | bool | None]) -> np.ndarray[Any, Any]:
    if name in INTEGERS:
        return np.array(values, dtype=np.int64)
    if name == "skipped":
        return np.array([bool(value) for value in values], dtype=np.bool_)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
