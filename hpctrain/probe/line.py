"""The line t = alpha + beta·bytes through message times, and the size at which it breaks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
"""(bytes, seconds)"""

BREAK_GAIN = 4.0
"""Two lines must explain the times so many times better than one (squared error) to be reported as a break."""
BREAK_LEAST = 0.1
"""One line that is off by less than this, root mean square of the relative error, is good enough."""
SMALL_BYTES = 4096
LARGE_SHARE = 16
"""Messages from this share of the largest on count as large."""


@dataclass(frozen=True)
class Line:
    """How long messages take."""

    alpha_s: float
    """Start-up time: of small messages, where there is a break."""
    beta_s_per_byte: float
    """Time per byte: of large messages, where there is a break."""
    break_bytes: int | None
    """Smallest size of the second line; None when there is no clear one."""


def fit_line(points: Sequence[Point]) -> Line:
    """One line through all points, or two where small and large messages behave differently.

    Libraries send small messages at once ("eager") and ask before large ones, cards and shapers let a burst pass: a
    single line through both is wrong for both. Times of a busy machine may fit neither one line nor two: then alpha is
    what small messages take and beta what large ones take, and no break is told.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    ordered = sorted(points)
    alpha, beta = fit_alpha_beta(ordered)
    whole = _error(ordered, alpha, beta)
    if (whole / len(ordered)) ** 0.5 < BREAK_LEAST:
        return Line(alpha, beta, None)
    return _two_lines(ordered, whole / BREAK_GAIN) or _ends(ordered) or Line(alpha, beta, None)


def _two_lines(ordered: Sequence[Point], least_error: float) -> Line | None:
    """The best two lines; None when their error is not below `least_error`."""
    best, found = least_error, None
    for cut in range(2, len(ordered) - 1):
        small, large = ordered[:cut], ordered[cut:]
        if small[0][0] == small[-1][0] or large[0][0] == large[-1][0] or small[-1][0] == large[0][0]:
            continue  # each line needs two sizes, and a size belongs to one of them
        (low_alpha, low_beta), (high_alpha, high_beta) = fit_alpha_beta(small), fit_alpha_beta(large)
        error = _error(small, low_alpha, low_beta) + _error(large, high_alpha, high_beta)
        # Large messages that take no time per byte are noise, not a second line.
        if high_beta > 0 and error < best:
            best, found = error, Line(low_alpha, high_beta, int(large[0][0]))
    return found


def _ends(ordered: Sequence[Point]) -> Line | None:
    """Alpha from messages that are small whatever the link, beta from the largest; None without enough of those."""
    small = [seconds for size, seconds in ordered if size <= SMALL_BYTES] or [ordered[0][1]]
    large = [(size, seconds) for size, seconds in ordered if size * LARGE_SHARE >= ordered[-1][0]]
    if large[0][0] == large[-1][0]:
        return None
    _, beta = fit_alpha_beta(large)
    return Line(statistics.median(small), beta, None) if beta > 0 else None


def one_way_s(round_trip_s: float, answer_s: float) -> float:
    """One-way seconds of a message whose small answer takes `answer_s`: never less than half of the round trip, because
    the answer is the smaller of the two. A disturbed answer would make the message look as if it took no time."""
    return max(round_trip_s - answer_s, round_trip_s / 2)


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Alpha in seconds and beta in seconds per byte of t = alpha + beta·bytes, from (bytes, seconds).

    Least squares of the relative error (each residual divided by its time), so that the small messages, which alone
    tell alpha, are not drowned by the large ones. Neither figure is ever negative.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ValueError("a line needs two sizes and positive times")
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    rise = sum(w * (size - mean_size) * (t - mean_time) for w, (size, t) in zip(weights, points, strict=True))
    beta = max(0.0, rise / spread)
    alpha = mean_time - beta * mean_size
    if alpha >= 0:
        return alpha, beta
    # The best line through the origin. Times are positive, so that its slope is.
    through_origin = sum(w * size * t for w, (size, t) in zip(weights, points, strict=True))
    return 0.0, through_origin / sum(w * size**2 for w, (size, _) in zip(weights, points, strict=True))


def _error(points: Sequence[Point], alpha: float, beta: float) -> float:
    """Sum of the squared relative errors."""
    return sum(((alpha + beta * size - seconds) / seconds) ** 2 for size, seconds in points)
