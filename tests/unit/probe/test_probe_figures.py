"""Percentiles, bandwidth from arrivals, and offsets of clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.probe.measure.figures import bandwidth_of, clock_offset, latency_of, percentile

POSITIVE = st.floats(1e-9, 1e3)


@given(st.lists(POSITIVE, min_size=1, max_size=200))
def test_latency_is_ordered_and_half_the_round_trip(samples: list[float]) -> None:
    latency = latency_of(samples)

    assert latency.min <= latency.p50 <= latency.p95 <= max(samples) / 2
    assert latency.min == min(samples) / 2


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


def arrivals(count: int, block: int, seconds: float) -> list[tuple[float, int]]:
    return [((index + 1) * seconds, (index + 1) * block) for index in range(count)]


@given(count=st.integers(4, 300), rate=st.floats(1e3, 1e11))
def test_a_steady_stream_has_its_rate(count: int, rate: float) -> None:
    measured, slices = bandwidth_of(arrivals(count, 65536, 65536 / rate))

    assert measured == pytest.approx(rate, rel=1e-6)
    assert 1 <= slices <= 8


def test_what_came_at_once_from_the_buffers_is_dropped() -> None:
    # The first quarter arrives a hundred times faster than the wire is.
    burst = [(index * 1e-5, (index + 1) * 1000) for index in range(25)]
    steady = [(1.0 + index * 1e-3, (26 + index) * 1000) for index in range(75)]

    measured, _ = bandwidth_of(burst + steady)

    assert measured == pytest.approx(1e6, rel=0.05)


def test_one_pause_does_not_move_the_median() -> None:
    steady = arrivals(100, 1000, 1e-3)
    stream = steady[:80] + [(time + 5.0, size) for time, size in steady[80:]]

    assert bandwidth_of(stream)[0] == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("stream", [[], [(0.0, 100)], [(1.0, 100), (1.0, 200), (1.0, 300)]])
def test_too_few_arrivals_have_no_bandwidth(stream: list[tuple[float, int]]) -> None:
    with pytest.raises(ValueError, match="too few"):
        bandwidth_of(stream)


def test_the_fastest_round_trip_tells_the_offset() -> None:
    assert clock_offset([(3e-3, 1.5), (1e-4, 1.0001), (2e-2, -4.0)]) == (1.0001, 5e-5)
