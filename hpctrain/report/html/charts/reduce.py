"""Fewer points of long curves, and smooth curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

SMOOTHED = 0.02
"""Share of a curve's points that the exponential mean looks back on: the window of `hpctrain compare`."""


def extremes(values: Sequence[float | None], most: int) -> list[int]:
    """Return the positions of the points that a curve of at most `most` points shows, in ascending order.

    Of more points, these are the first, the last, and the smallest and the largest of each of most / 2 - 1 equal
    stretches, so that no peak is lost. A stretch without finite values shows its first one, so that gaps stay gaps.

    Args:
        most: at least 4.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = most // 2 - 1
    chosen = {0, count - 1}
    for number in range(stretches):
        start, stop = number * count // stretches, (number + 1) * count // stretches
        stretch = ((values[index], index) for index in range(start, stop))
        known = [(value, index) for value, index in stretch if value is not None and math.isfinite(value)]
        chosen |= {min(known)[1], max(known)[1]} if known else {start}
    return sorted(chosen)


def smoothed(values: Sequence[float | None]) -> list[float | None] | None:
    """Return the exponential mean of each value and those before it, or None for fewer than 50 values, which need none.

    The mean has the weights of an exponential decay of `SMOOTHED` of the points, corrected for the short past of the
    first points (Kingma and Ba 2015, section 3). A gap stays a gap and counts in no mean.
    """
    span = SMOOTHED * len(values)
    if span < 1:
        return None
    decay = math.exp(-1 / span)
    total = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            means.append(None)
            continue
        total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        means.append(total / weight)
    return means
