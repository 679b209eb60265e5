"""Computes the figures of a link from its samples: percentiles of latency, bandwidth from arrivals, clock offset. Pure.

The module also fits the times of messages by a line t = alpha + beta·bytes, or by two lines with a break between small
and large messages.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from hpctrain.records.format.document import Part
from hpctrain.records.topology.link import Latency

SLICES = 8
"""Most slices into which the timed part of a transfer is cut; the median of their rates is the bandwidth."""
MAX_SIZES = 64
"""Most message sizes of one size sweep."""
Floats = npt.NDArray[np.float64]
Point = tuple[float, float]
"""(bytes of a message, seconds that the message takes)"""
BREAK_GAIN = 4.0
"""Factor by which two lines must lower the squared error of one line, so that a break is reported."""
MIN_BREAK_ERROR = 0.1
"""Root mean square of the relative error of one line, below which one line is good enough and no break is searched
for."""
SMALL_BYTES = 4096
"""Messages of up to this many bytes count as small."""
LARGE_SHARE = 16
"""Messages of at least the largest measured size, divided by this number, count as large."""


def _ascending(rungs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    sizes = [size for size, _ in rungs]
    if sizes != sorted(set(sizes)) or any(size <= 0 or seconds <= 0 for size, seconds in rungs):
        raise ValueError("sizes must be positive and grow, and times be positive")
    return rungs


def _positive(latency: Latency) -> Latency:
    if min(latency.min, latency.p50, latency.p95) <= 0:
        raise ValueError("latencies must be positive")
    return latency


SizeTimes = Annotated[tuple[tuple[int, float], ...], Field(max_length=MAX_SIZES), AfterValidator(_ascending)]
"""(bytes, one-way seconds) of messages, smallest first."""


class PairFigures(Part):
    """The figures that one end of a pair of nodes measured: latency (`latency`) from its pings, times of its size sweep
    (`ladder`), bandwidth at which it received (`bytes_per_s`, the median over `n` slices), the share of the time in
    which it needed a processor while sending and receiving (`sending_cpu`, `receiving_cpu`), and the peer's clock minus
    its own (`clock_offset_s`) with the largest error."""

    latency: Annotated[Latency, AfterValidator(_positive)]
    """One-way latency, from the round trips that this end started."""
    bytes_per_s: float = Field(gt=0)
    """Bandwidth at which this end received."""
    n: int = Field(ge=1)
    """Number of slices of the transfer behind `bytes_per_s`."""
    ladder: SizeTimes = ()
    """(bytes, median one-way seconds) of the size sweep: single messages that this end sent, smallest first."""
    sending_cpu: float | None = None
    """Share of its sending time in which this end used a processor or waited for one."""
    receiving_cpu: float | None = None
    """Share of its receiving time in which this end used a processor or waited for one."""
    clock_offset_s: float | None = None
    """The peer's clock minus this end's, in seconds."""
    clock_error_s: float | None = None
    """Largest error of `clock_offset_s`: half of the fastest round trip."""
    iface: str | None = None
    """Network interface that this end's socket used."""


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample at rank share × (n − 1), rounded, of the n samples in ascending order: the smallest for `share`
    0, the largest for 1.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a percentile of no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]


def latency_of(round_trips_s: Sequence[float]) -> Latency:
    """Return minimum, median and 95th percentile of the one-way latency in seconds. One way is half of a round trip,
    because one clock cannot time the two directions separately.

    Raises:
        ValueError: no round trips.
    """
    one_way = [seconds / 2 for seconds in round_trips_s]
    return Latency(min=min(one_way), p50=percentile(one_way, 0.5), p95=percentile(one_way, 0.95))


def bandwidth_of(arrivals: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return (bandwidth in bytes per second, number of slices behind it).

    The first quarter of the volume is dropped, because it was sent into empty buffers. The rest is cut into up to
    `SLICES` slices with equal numbers of arrivals. The bandwidth is the median of the slices' rates, which ignores a
    burst or a pause.

    Args:
        arrivals: (clock time in seconds, bytes received until then), one pair each time that a fixed number of bytes
            has arrived.

    Raises:
        ValueError: fewer than two arrivals at different times after the first quarter.
    """
    total = arrivals[-1][1] if arrivals else 0
    timed = [arrival for arrival in arrivals if arrival[1] >= total / 4]
    slices = min(SLICES, len(timed) - 1)
    if slices < 1 or timed[-1][0] <= timed[0][0]:
        raise ValueError("too few arrivals for a bandwidth")
    marks = [timed[round(index * (len(timed) - 1) / slices)] for index in range(slices + 1)]
    # A slice read from the buffer at once took no measurable time and has no rate.
    rates = [
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in itertools.pairwise(marks)
        if after[0] > before[0]
    ]
    return statistics.median(rates), len(rates)


def clock_offset(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (the peer's clock minus this node's, its largest error), both in seconds.

    The fastest round trip limits the error most (Mills, RFC 5905, clock filter).

    Args:
        samples: (round trip, offset if the peer wrote its answer in the middle of the round trip), in seconds.

    Raises:
        ValueError: no samples.
    """
    round_trip, offset = min(samples)
    return offset, round_trip / 2


@dataclass(frozen=True)
class AlphaBetaLine:
    """The time of a message of n bytes on a link: alpha + beta·n. With a break, small and large messages follow
    different lines; alpha is then that of small messages, beta that of large ones."""

    alpha_s: float
    """Start-up time; with a break, that of the line of small messages."""
    beta_s_per_byte: float
    """Time per byte; with a break, that of the line of large messages."""
    break_bytes: int | None
    """Smallest size in bytes on the line of large messages; None when there is no clear break."""


def fit_lines(many: Sequence[Sequence[Point]]) -> list[AlphaBetaLine]:
    """Return for each link the line t = alpha + beta·bytes through all its points. Where small and large messages
    follow different lines, alpha is that of small messages and beta that of large ones.

    A single line is wrong where libraries send small messages at once ("eager") and negotiate large ones, or where
    network cards and traffic shapers let a burst pass. Times of a busy machine may fit neither one line nor two. Then
    alpha is the time of small messages, beta the slope of large ones, and no break is reported. All lines are fitted at
    once, because a probe of 1,000 nodes has a million directions.

    Args:
        many: for each link its points (bytes, seconds), in any order.

    Raises:
        ValueError: a link has fewer than two different sizes, or a time that is not positive.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    ordered = [sorted(points) for points in many]
    for place, points in enumerate(ordered):
        groups.setdefault(tuple(size for size, _ in points), []).append(place)
    lines: dict[int, AlphaBetaLine] = {}
    for sizes, places in groups.items():
        seconds = np.array([[seconds for _, seconds in ordered[place]] for place in places])
        lines |= zip(places, _of_same_sizes(sizes, seconds), strict=True)
    return [lines[place] for place in range(len(many))]


def _of_same_sizes(sizes: Sequence[float], seconds: Floats) -> list[AlphaBetaLine]:
    """Return for each link the line that fits its times, for links whose messages have the same sizes.

    Args:
        sizes: bytes of each message, ascending.
        seconds: times of the messages, [link, size].
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
    """Return (alpha, beta, size of the break in bytes) for links that one line fits poorly, each an array by link.

    Where two lines, for messages below and from the break on, are clearly better than one, alpha is that of the first
    line and beta that of the second. Elsewhere the size of the break is 0, alpha is the median time of the small
    messages, and beta is fitted to the large ones; if these give no positive beta, the one line stays.

    Args:
        size: bytes of each message, ascending.
        seconds: times of shape (links, sizes).
        whole: sum of the squared relative errors of the one line, by link.
        alpha, beta: the one line of each link.
    """
    breaks = np.zeros(len(seconds), dtype=np.int64)
    small, large = size <= SMALL_BYTES, size * LARGE_SHARE >= size[-1]
    if size[large][0] < size[-1]:
        # Where no message is small, the smallest is used.
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
    """Return the one-way seconds of a message: its round trip minus `answer_s`, the one-way seconds of its small
    answer.

    The result is at least half of the round trip, because the answer is the smaller message. Otherwise the message
    would seem to take no time if something delayed the messages from which `answer_s` was measured.
    """
    return max(round_trip_s - answer_s, round_trip_s / 2)


def fit_alpha_beta(points: Sequence[Point]) -> tuple[float, float]:
    """Return alpha in seconds and beta in seconds per byte of t = alpha + beta·bytes, fitted to points (bytes,
    seconds).

    The fit is least squares of the relative error (each residual divided by its time), so that the large messages do
    not outweigh the small ones, which alone determine alpha. Neither figure is ever negative.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    alpha, beta = _fit(np.array([size for size, _ in points]), np.array([[seconds for _, seconds in points]]))
    return float(alpha[0]), float(beta[0])


def _fit(size: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return (alpha, beta), arrays with one value for each row of `seconds`, fitted as `fit_alpha_beta` does. `size`
    has the bytes of each column.

    Raises:
        ValueError: as of `fit_alpha_beta`, for any row.
    """
    if len(size) < 2 or (size == size[0]).all() or (seconds <= 0).any():
        raise ValueError("a line needs two sizes and positive times")
    # Only ratios of weights matter. The fastest message has weight 1, so that tiny times do not overflow.
    weights = (seconds.min(axis=1, keepdims=True) / seconds) ** 2
    total = weights.sum(axis=1)
    mean_size, mean_time = (weights * size).sum(axis=1) / total, (weights * seconds).sum(axis=1) / total
    away = size - mean_size[:, None]
    spread, rise = (weights * away**2).sum(axis=1), (weights * away * (seconds - mean_time[:, None])).sum(axis=1)
    beta = np.maximum(0.0, rise / spread)
    alpha = mean_time - beta * mean_size
    # Where alpha would be negative: the best line through the origin. Its slope is positive, as the times are.
    through_origin = (weights * size * seconds).sum(axis=1) / (weights * size**2).sum(axis=1)
    return np.where(alpha >= 0, alpha, 0.0), np.where(alpha >= 0, beta, through_origin)


def _error(size: Floats, seconds: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Return for each row of `seconds` the sum of the squared relative errors of the line alpha + beta·size."""
    predicted = alpha[:, None] + beta[:, None] * size
    error: Floats = (((predicted - seconds) / seconds) ** 2).sum(axis=1)
    return error
