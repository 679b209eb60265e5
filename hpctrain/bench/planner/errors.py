"""Errors of predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Errors of a problem's predictions, in percent of the measured figures."""

    runs: int
    mean: float
    """Mean absolute error, in percent of the measured figure."""
    largest: float
    bias: float
    """Mean signed error; above 0, predictions are too slow or too large."""
    below: float
    """Percentage of the runs whose prediction is below the measurement."""


def errors_of(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Return the errors of predictions; both sequences must not be empty, and all measurements must be above 0."""
    error = 100 * (np.array(predicted) / np.array(measured) - 1)
    size = np.abs(error)
    return Errors(
        len(error), float(size.mean()), float(size.max()), float(error.mean()), float(100 * (error < 0).mean())
    )
