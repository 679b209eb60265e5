"""Errors of predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Relative errors of a problem's runs, in percent of the measured figure."""

    runs: int
    mean: float
    """Mean absolute error."""
    largest: float
    bias: float
    """Mean signed error; above 0, the prediction is too slow or too large."""
    below: float
    """Share of the runs whose prediction is below the measurement, in percent."""


def errors_of(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Errors of predictions; both sequences are not empty and all measurements are above 0."""
    error = 100 * (np.array(predicted) / np.array(measured) - 1)
    size = np.abs(error)
    return Errors(
        len(error), float(size.mean()), float(size.max()), float(error.mean()), float(100 * (error < 0).mean())
    )
