"""Computes the figures of a link from its samples: percentiles of latency, bandwidth from arrivals, clock offset.
Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from hpctrain.records.format.document import Part
from hpctrain.records.topology.link import Latency

SLICES = 8
"""Number of slices of the timed part of a transfer; the median of their rates is the bandwidth."""
MAX_SIZES = 64


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
"""(bytes, one-way seconds) of messages, in the order of their size."""


class PairFigures(Part):
    """The figures that one end of a pair measured."""

    latency: Annotated[Latency, AfterValidator(_positive)]
    """One-way latency, from the round trips that this end started."""
    bytes_per_s: float = Field(gt=0)
    """Bandwidth at which this end received."""
    n: int = Field(ge=1)
    """Number of slices behind the bandwidth."""
    ladder: SizeTimes = ()
    """Median one-way seconds of single messages that this end sent, by size in bytes."""
    sending_cpu: float | None = None
    """Share of its sending time in which this end used a processor or waited for one."""
    receiving_cpu: float | None = None
    """Share of its receiving time in which this end used a processor or waited for one."""
    clock_offset_s: float | None = None
    """The peer's clock minus this end's."""
    clock_error_s: float | None = None
    """Largest error of the offset: half of the fastest round trip."""
    iface: str | None = None
    """Network interface that this end's socket used."""


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample such that `share` of all samples are at or below it (nearest rank).

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a percentile of no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]


def latency_of(round_trips_s: Sequence[float]) -> Latency:
    """Return the one-way latency, as half of each round trip: one clock cannot time the two directions separately."""
    one_way = [seconds / 2 for seconds in round_trips_s]
    return Latency(min=min(one_way), p50=percentile(one_way, 0.5), p95=percentile(one_way, 0.95))


def bandwidth_of(arrivals: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return bytes per second and the number of slices behind it, from (seconds, bytes so far) at the receiver.

    The first quarter is dropped, because it was sent into empty buffers. The rest is cut into slices of equal volume;
    the median of their rates ignores a burst or a pause.

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
    """Return the peer's clock minus ours and its largest error, both in seconds.

    The fastest round trip limits the error most (Mills, RFC 5905, clock filter).

    Args:
        samples: (round trip, offset if the answer was written half-way), in seconds.

    Raises:
        ValueError: no samples.
    """
    round_trip, offset = min(samples)
    return offset, round_trip / 2
