"""What pairs of measurements say, and how sure one may be of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.comparison import TimeSample, compare, interval
from hpctrain.bench.record import make_record

TIMES = st.floats(min_value=1e-6, max_value=1e3)


def pairs(*times: tuple[float, float]) -> list[tuple[TimeSample, TimeSample]]:
    return [(TimeSample(ours, 2 * ours), TimeSample(other, 3 * other)) for ours, other in times]


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    row = compare("case", "other", pairs((2, 1), (3, 1), (100, 1)))
    assert (row.ratio, row.ours_s, row.other_s, row.pairs) == (3, 3, 1, 3)
    assert (row.ours_cpu_s, row.other_cpu_s) == (6, 3)


def test_noise_that_both_sides_share_does_not_count() -> None:
    row = compare("case", "other", pairs((1.1, 1.0), (11.0, 10.0), (2.2, 2.0)))
    assert row.ratio == pytest.approx(1.1)
    assert row.spread == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30))
def test_the_interval_holds_the_ratio(times: list[tuple[float, float]]) -> None:
    row = compare("case", "other", pairs(*times))
    assert row.low <= row.ratio * (1 + 1e-12)
    assert row.high >= row.ratio * (1 - 1e-12)


def test_the_interval_is_right_nine_times_out_of_ten() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = interval(rng.normal(1.0, 0.1, 25), draws=400)
        hits += low <= 1.0 <= high
    assert 165 <= hits <= 195


def test_the_same_pairs_give_the_same_interval() -> None:
    values = np.array([1.0, 1.1, 0.9, 1.3])
    assert interval(values) == interval(values)


def test_no_pairs_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="case: no pairs"):
        compare("case", "other", [])


def test_a_record_says_where_it_was_measured_and_leaves_out_what_was_not() -> None:
    record = make_record("runtime", [compare("pp2", "other", pairs((1, 1)), cpu=False)], {"pairs": 1})
    assert record["machine"]["cores"] >= 1
    assert set(record["versions"]) == {"hpctrain", "torch", "python"}
    assert "ours_cpu_s" not in record["rows"][0]
    assert {"case", "ratio", "low", "high", "spread"} <= set(record["rows"][0])
