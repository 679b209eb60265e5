"""Statistics of paired measurements (the median ratio and its confidence interval), and errors of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
"""Number of bootstrap samples; more of them change only the third digit of the interval."""


@dataclass(frozen=True)
class TimeSample:
    """Wall time and CPU time of hpctrain, or of what it is compared with, in one pair of measurements."""

    wall_s: float
    cpu_s: float
    """CPU seconds, summed over all processes."""


@dataclass(frozen=True)
class ComparisonRow:
    """Result of one case: the time of hpctrain compared with that of another implementation, over pairs of
    measurements.

    `ratio` is the median of hpctrain's time divided by the other's, `low` and `high` its 90 % interval. `spread` is
    the uncertainty of one pair, as a share of `ratio`.
    """

    case: str
    against: str
    """Name of the other implementation."""
    ratio: float
    """Time of hpctrain divided by the time of the other, median over the pairs; above 1, hpctrain is slower."""
    low: float
    high: float
    """`low` and `high`: ends of the 90 % interval of `ratio`, by bootstrap over the pairs."""
    ours_s: float
    other_s: float
    """`ours_s` and `other_s`: median wall seconds of hpctrain and of the other."""
    ours_cpu_s: float | None
    other_cpu_s: float | None
    """`ours_cpu_s` and `other_cpu_s`: medians of CPU seconds, of hpctrain and of the other. None where one side
    is computed instead of measured, or where both run in the same processes."""
    spread: float
    """Half the interquartile range of the pairs' ratios, divided by the median ratio: the uncertainty of one pair."""
    pairs: int


def compare(case: str, against: str, pairs: Sequence[tuple[TimeSample, TimeSample]], cpu: bool = True) -> ComparisonRow:
    """Return the summary of the pairs (hpctrain, other), whose two samples were measured one right after the other.

    Args:
        case: name of the case.
        against: name of the other implementation.
        cpu: whether the row reports CPU seconds; False where one side is computed, or where both run in the same
            processes.

    Raises:
        ValueError: there is no pair, or the other side took no time.
    """
    ours = np.array([sample.wall_s for sample, _ in pairs])
    other = np.array([other_sample.wall_s for _, other_sample in pairs])
    if len(pairs) == 0 or (other <= 0).any():
        raise ValueError(f"{case}: no pairs that took time")
    ratios = ours / other
    low, high = interval(ratios)
    quartiles = np.percentile(ratios, [25, 75])
    return ComparisonRow(
        case=case,
        against=against,
        ratio=float(np.median(ratios)),
        low=low,
        high=high,
        ours_s=float(np.median(ours)),
        other_s=float(np.median(other)),
        ours_cpu_s=float(np.median([sample.cpu_s for sample, _ in pairs])) if cpu else None,
        other_cpu_s=float(np.median([other_sample.cpu_s for _, other_sample in pairs])) if cpu else None,
        spread=float((quartiles[1] - quartiles[0]) / 2 / np.median(ratios)),
        pairs=len(pairs),
    )


def interval(values: np.ndarray, draws: int = DRAWS) -> tuple[float, float]:
    """Return (low, high), the 90 % interval of the median of `values`, by bootstrap (Efron 1979). The seed is fixed, so
    equal values give an equal interval."""
    chosen = np.random.default_rng(0).integers(0, len(values), size=(draws, len(values)))
    low, high = np.percentile(np.median(values[chosen], axis=1), [5, 95])
    return float(low), float(high)


@dataclass(frozen=True)
class Errors:
    """Errors of predictions over a number of runs, in percent of the measured figures: mean and largest absolute error,
    and mean signed error (`bias`, above 0 if predictions are too large). `below` is the percentage of runs that were
    predicted too low."""

    runs: int
    mean: float
    """Mean absolute error, in percent of the measured figure."""
    largest: float
    """Largest absolute error."""
    bias: float
    """Mean signed error; above 0, predictions are larger than the measurements."""
    below: float
    """Percentage of the runs whose prediction is below the measurement."""


def errors_of(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Return the errors of predictions. `predicted` and `measured` are equally long and not empty, and all measurements
    are above 0."""
    error = 100 * (np.array(predicted) / np.array(measured) - 1)
    size = np.abs(error)
    return Errors(
        len(error), float(size.mean()), float(size.max()), float(error.mean()), float(100 * (error < 0).mean())
    )
