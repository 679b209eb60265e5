"""What pairs of measurements say: the median ratio and how sure one may be of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
"""Resampled sets of pairs; more change the third digit of the interval only."""


@dataclass(frozen=True)
class TimeSample:
    """What one side of a pair took."""

    wall_s: float
    cpu_s: float
    """Processor seconds of all processes together."""


@dataclass(frozen=True)
class ComparisonRow:
    """One case of a comparison, as a bench prints it."""

    case: str
    against: str
    """What ours is compared with."""
    ratio: float
    """Median over the pairs of ours / other: above 1, ours is slower."""
    low: float
    high: float
    """90 % interval of that median, by bootstrap over the pairs."""
    ours_s: float
    other_s: float
    ours_cpu_s: float | None
    other_cpu_s: float | None
    """Medians of processor seconds; absent where one side is computed, or shares its processes with the other."""
    spread: float
    """Half the interquartile range of the pairs' ratios, as a share of the median ratio: what one pair is worth."""
    pairs: int


def compare(case: str, against: str, pairs: Sequence[tuple[TimeSample, TimeSample]], cpu: bool = True) -> ComparisonRow:
    """Summarise pairs of (ours, other), each pair measured one right after the other.

    Raises:
        ValueError: there is no pair, or the other one took no time.
    """
    ours = np.array([mine.wall_s for mine, _ in pairs])
    other = np.array([theirs.wall_s for _, theirs in pairs])
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
        ours_cpu_s=float(np.median([mine.cpu_s for mine, _ in pairs])) if cpu else None,
        other_cpu_s=float(np.median([theirs.cpu_s for _, theirs in pairs])) if cpu else None,
        spread=float((quartiles[1] - quartiles[0]) / 2 / np.median(ratios)),
        pairs=len(pairs),
    )


def interval(values: np.ndarray, draws: int = DRAWS) -> tuple[float, float]:
    """90 % interval of the median, by bootstrap (Efron 1979); the same for the same values."""
    chosen = np.random.default_rng(0).integers(0, len(values), size=(draws, len(values)))
    low, high = np.percentile(np.median(values[chosen], axis=1), [5, 95])
    return float(low), float(high)
