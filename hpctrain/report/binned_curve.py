"""A figure over the steps of a run of any length, in bounded memory, and its drawing as a sparkline."""

from __future__ import annotations

import math
from collections.abc import Sequence

BINS_MAX = 512
"""Most bins of a curve; with more, every two neighbouring bins become one."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from the smallest value to the largest."""


class BinnedCurve:
    """The means of a figure over bins of equally many steps. When a step is done again, its bin and all later bins are
    dropped first."""

    def __init__(self) -> None:
        self._width = 1
        self._bins: dict[int, tuple[float, int]] = {}
        self._last_step = 0

    def add(self, step: int, value: float) -> None:
        """Add the figure of a step; a value that is not finite is left out.

        Args:
            step: number of the step, from 1 on.
        """
        number = step // self._width
        if step <= self._last_step:
            self._bins = {known: bin_ for known, bin_ in self._bins.items() if known < number}
        self._last_step = step
        if math.isfinite(value):
            total, count = self._bins.get(number, (0.0, 0))
            self._bins[number] = total + value, count + 1
        if len(self._bins) > BINS_MAX:
            self._halve()

    def columns(self, width: int) -> list[float]:
        """Return means over at most `width` equal parts of the steps so far, in the order of steps; [] without steps. A
        part of which no step is known has the value of the part before it."""
        if not self._bins or width < 1:
            return []
        first, last = min(self._bins), max(self._bins)
        count = min(width, last - first + 1)
        parts: dict[int, list[float]] = {}
        for number, (total, steps) in self._bins.items():
            parts.setdefault((number - first) * count // (last - first + 1), []).append(total / steps)
        values: list[float] = []
        for column in range(count):
            part = parts.get(column)
            values.append(sum(part) / len(part) if part else values[-1])
        return values

    def _halve(self) -> None:
        self._width *= 2
        merged: dict[int, tuple[float, int]] = {}
        for number, (total, count) in self._bins.items():
            before, n = merged.get(number // 2, (0.0, 0))
            merged[number // 2] = before + total, n + count
        self._bins = merged


def sparkline(values: Sequence[float]) -> str:
    """Return values as a line of blocks. The lowest block is the smallest value; values that are all equal are drawn in
    the middle."""
    return "".join(block(value, min(values), max(values)) for value in values)


def block(value: float, low: float, high: float) -> str:
    """Return the block whose height is the place of `value` between `low` and `high`; if `low` equals `high`, a
    block of middle height."""
    share = (value - low) / (high - low) if high > low else 0.5
    return BLOCKS[max(0, min(len(BLOCKS) - 1, int(share * len(BLOCKS))))]
