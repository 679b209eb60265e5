"""Which methods of compression are worth their loss."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.compression.convergence_summary import AtRate, Band, Summary
from hpctrain.bench.compression.pareto import TradeOff, pareto_front, pareto_text

FIGURES = st.floats(0.01, 100)


def summary(method: str, sent_bytes: float | None, gap_pct: float | None, step_s: float) -> Summary:
    gap = None if gap_pct is None else Band(gap_pct, 0.1, 3)
    return Summary(method, gap, gap, 0, sent_bytes, 0.1, {1e8: AtRate(step_s, gap, None)} if sent_bytes else {})


@given(st.lists(st.builds(TradeOff, st.just("m"), FIGURES, FIGURES), max_size=12))
def test_nothing_is_better_than_the_front_and_all_else_is_beaten_by_it(methods: list[TradeOff]) -> None:
    front = pareto_front(methods)

    def beats(one: TradeOff, other: TradeOff) -> bool:
        return one[1:] != other[1:] and one.cost <= other.cost and one.gap_pct <= other.gap_pct

    assert not [one for one in front for other in methods if beats(other, one)]
    rest = [one for one in methods if one[1:] not in [point[1:] for point in front]]
    assert all(any(beats(point, one) for point in front) for one in rest)
    assert front == sorted(front, key=lambda one: one.cost)


def test_the_page_has_a_chart_for_bytes_and_for_each_rate_with_the_methods_that_are_known() -> None:
    summaries = [
        summary("dense", 6e6, 0.0, 0.5), summary("int4", 0.75e6, 0.4, 0.1), summary("topk", 0.7e6, 9.0, 0.12),
        summary("fsdp2_fp32", None, 0.0, 0.3), summary("diverged", 1e6, None, 0.1),
    ]  # fmt: skip
    text = pareto_text(summaries, {1e8: "100mbit"}, 1_000_000)
    assert text.count("quadrantChart") == 2
    points = re.findall(r'"(\w+)": \[([\d.]+), ([\d.]+)\]', text)
    assert [name for name, _, _ in points] == ["dense", "int4", "topk"] * 2
    assert all(0 < float(x) < 1 and 0 < float(y) < 1 for _, x, y in points)
    assert "from the cheapest: `topk` (0.7 B/parameter, +9.00 %), `int4` (0.75 B/parameter, +0.40 %), `dense`" in text
    assert "from the cheapest: `int4` (100 ms, +0.40 %), `dense` (500 ms, +0.00 %)" in text
    assert pareto_text(summaries[3:], {1e8: "100mbit"}, 1_000_000) == ""
