"""The line t = alpha + beta·bytes through message times, and the size at which it breaks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Point = tuple[float, float]
"""(bytes, seconds)"""

BREAK_GAIN = 4.0
"""Two lines must explain the times so many times better than one (squared error) to be reported as a break."""
MIN_BREAK_ERROR = 0.1
"""One line that is off by less than this, root mean square of the relative error, is good enough."""
SMALL_BYTES = 4096
LARGE_SHARE = 16
"""Messages from this share of the largest on count as large."""


@dataclass(frozen=True)
class AlphaBetaLine:
    """How long messages take."""

    alpha_s: float
    """Start-up time: of small messages, where there is a break."""
    beta_s_per_byte: float
    """Time per byte: of large messages, where there is a break."""
    break_bytes: int | None
    """Smallest size of the second line; None when there is no clear one."""


def fit_line(points: Sequence[Point]) -> AlphaBetaLine:
    """One line through all points, or two where small and large messages behave differently.

    Libraries send small messages at once ("eager") and ask before large ones, cards and shapers let a burst pass: a
    single line through both is wrong for both. Times of a busy machine may fit neither one line nor two: then alpha is
    what small messages take and beta what large ones take, and no break is told.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    return fit_lines([points])[0]


def fit_lines(many: Sequence[Sequence[Point]]) -> list[AlphaBetaLine]:
    """See `fit_line`, for the points of many links at once: a probe of 1,000 nodes has a million of them."""
    groups: dict[tuple[float, ...], list[int]] = {}
    ordered = [sorted(points) for points in many]
    for place, points in enumerate(ordered):
        groups.setdefault(tuple(size for size, _ in points), []).append(place)
    found: dict[int, AlphaBetaLine] = {}
    for sizes, places in groups.items():
        seconds = np.array([[seconds for _, seconds in ordered[place]] for place in places])
        found |= zip(places, _of_same_sizes(sizes, seconds), strict=True)
    return [found[place] for place in range(len(many))]


def _of_same_sizes(sizes: Sequence[float], seconds: Floats) -> list[AlphaBetaLine]:
    """Lines of links with messages of the same sizes.

    Args:
        sizes: bytes of each message, ascending.
        seconds: times of shape (links, sizes).
    """
    size = np.asarray(sizes, dtype=np.float64)
    alpha, beta = _fit(size, seconds)
    whole = _error(size, seconds, alpha, beta)
    breaks = np.zeros(len(seconds), dtype=np.int64)
    poor = np.flatnonzero((whole / max(1, len(size))) ** 0.5 >= MIN_BREAK_ERROR)
    if len(poor):
        alpha[poor], beta[poor], breaks[poor] = _two_lines(size, seconds[poor], whole[poor], alpha[poor], beta[poor])
    return [
        AlphaBetaLine(start_up, per_byte, at or None)
        for start_up, per_byte, at in zip(alpha.tolist(), beta.tolist(), breaks.tolist(), strict=True)
    ]


def _two_lines(
    size: Floats, seconds: Floats, whole: Floats, alpha: Floats, beta: Floats
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """(alpha, beta, size of the break or 0) of links that one line is poor for.

    Args:
        whole: error of the one line.
        alpha, beta: the one line, which stays where nothing else is better.
    """
    breaks = np.zeros(len(seconds), dtype=np.int64)
    small, large = size <= SMALL_BYTES, size * LARGE_SHARE >= size[-1]
    if size[large][0] < size[-1]:
        # Where no message is small, the smallest stands for them.
        few = seconds[:, small] if small.any() else seconds[:, :1]
        steep = _fit(size[large], seconds[:, large])[1]
        alpha, beta = np.where(steep > 0, np.median(few, axis=1), alpha), np.where(steep > 0, steep, beta)
    best = whole / BREAK_GAIN
    for cut in range(2, len(size) - 1):
        if size[0] == size[cut - 1] or size[cut] == size[-1] or size[cut - 1] == size[cut]:
            continue  # each line needs two sizes, and a size belongs to one of them
        low, high = _fit(size[:cut], seconds[:, :cut]), _fit(size[cut:], seconds[:, cut:])
        error = _error(size[:cut], seconds[:, :cut], *low) + _error(size[cut:], seconds[:, cut:], *high)
        # Large messages that take no time per byte are noise, not a second line.
        better = (high[1] > 0) & (error < best)
        best, breaks = np.where(better, error, best), np.where(better, int(size[cut]), breaks)
        alpha, beta = np.where(better, low[0], alpha), np.where(better, high[1], beta)
    return alpha, beta, breaks


def one_way_s(round_trip_s: float, answer_s: float) -> float:
    """One-way seconds of a message whose small answer takes `answer_s`: never less than half of the round trip, because
    the answer is the smaller of the two. A disturbed answer would make the message look as if it took no time."""
    return max(round_trip_s - answer_s, round_trip_s / 2)


def fit_alpha_beta(points: Sequence[Point]) -> tuple[float, float]:
    """Alpha in seconds and beta in seconds per byte of t = alpha + beta·bytes, from (bytes, seconds).

    Least squares of the relative error (each residual divided by its time), so that the small messages, which alone
    tell alpha, are not drowned by the large ones. Neither figure is ever negative.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    alpha, beta = _fit(np.array([size for size, _ in points]), np.array([[seconds for _, seconds in points]]))
    return float(alpha[0]), float(beta[0])


def _fit(size: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """See `fit_alpha_beta`, for each row of `seconds`."""
    if len(size) < 2 or (size == size[0]).all() or (seconds <= 0).any():
        raise ValueError("a line needs two sizes and positive times")
    # Weights matter only beside each other; those of the quickest message are 1, lest tiny times overflow.
    weights = (seconds.min(axis=1, keepdims=True) / seconds) ** 2
    total = weights.sum(axis=1)
    mean_size, mean_time = (weights * size).sum(axis=1) / total, (weights * seconds).sum(axis=1) / total
    away = size - mean_size[:, None]
    spread, rise = (weights * away**2).sum(axis=1), (weights * away * (seconds - mean_time[:, None])).sum(axis=1)
    beta = np.maximum(0.0, rise / spread)
    alpha = mean_time - beta * mean_size
    # Else the best line through the origin. Times are positive, so that its slope is.
    through_origin = (weights * size * seconds).sum(axis=1) / (weights * size**2).sum(axis=1)
    return np.where(alpha >= 0, alpha, 0.0), np.where(alpha >= 0, beta, through_origin)


def _error(size: Floats, seconds: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Sum of the squared relative errors of each row."""
    told = alpha[:, None] + beta[:, None] * size
    error: Floats = (((told - seconds) / seconds) ** 2).sum(axis=1)
    return error
