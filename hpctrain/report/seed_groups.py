"""Groups of runs that differ only in their seed, and means over such groups with t intervals."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
"""Confidence of the intervals."""
IGNORED = ("name", "seed")
"""Keys of the run file that may differ within a group."""


@dataclass(frozen=True)
class MeanInterval:
    """The mean over the runs of a group, with its 95 % t interval (Student 1908): mean ± half_width."""

    mean: float
    half_width: float
    """t · s / √n: s is the standard deviation of the n values (with n − 1), t the 97.5 % quantile of Student's
    distribution with n − 1 degrees of freedom. The values are taken as normally distributed."""
    runs: int
    """Number n of the runs that have a value, at least 2."""


def mean_interval(values: Sequence[float | None]) -> MeanInterval | None:
    """Return the mean of the values that are not None, with its 95 % t interval; None for fewer than two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    from scipy.special import stdtrit  # takes a third of a second to load

    quantile = float(stdtrit(len(known) - 1, (1 + CONFIDENCE) / 2))
    half_width = quantile * statistics.stdev(known) / math.sqrt(len(known))
    return MeanInterval(statistics.fmean(known), half_width, len(known))


def groups_by_seed(settings: Sequence[Mapping[str, Any] | None]) -> list[list[int]]:
    """Return the positions of the runs of each group of two or more, in the order of the groups' first runs. Of runs
    with equal settings and an equal seed, only the first is in the group: the others tell nothing about other seeds.

    Args:
        settings: keys of each run file with their values, such as 'optimizer.lr'; None for a run that is in no group.
    """
    groups: dict[str, dict[Any, int]] = {}
    for position, values in enumerate(settings):
        if values is not None:
            others = {key: value for key, value in values.items() if key not in IGNORED}
            groups.setdefault(json.dumps(others, sort_keys=True), {}).setdefault(values.get("seed"), position)
    return [list(group.values()) for group in groups.values() if len(group) > 1]
