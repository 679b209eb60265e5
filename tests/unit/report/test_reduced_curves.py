"""Curves with fewer points, smooth curves, percentiles of stretches, and parts of a long log of ranks."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.history.rank_log import RankRow
from hpctrain.report import rank_history
from hpctrain.report.html.charts.chart import Axis, Curve, LineChart
from hpctrain.report.html.charts.reduce import extremes, smoothed
from hpctrain.report.percentiles import step_time_percentiles, stretches_of_steps
from hpctrain.report.rank_history import read_rank_history
from hpctrain.report.rank_times import slowness

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan)), max_size=300)


@given(VALUES, st.integers(4, 40))
def test_few_points_keep_both_ends_and_every_extreme(values, most):
    shown = extremes(values, most)
    assert shown == sorted(set(shown))
    assert len(shown) <= max(most, min(len(values), most))
    known = [value for value in values if value is not None and math.isfinite(value)]
    if values:
        assert (shown[0], shown[-1]) == (0, len(values) - 1)
    if known:
        drawn = [values[index] for index in shown if values[index] is not None]
        assert min(known) in drawn
        assert max(known) in drawn


@given(st.lists(st.floats(-1e6, 1e6), min_size=50, max_size=200))
def test_a_smooth_curve_stays_within_the_values(values):
    means = smoothed(values)
    assert len(means) == len(values)
    assert means[0] == pytest.approx(values[0])
    for number, mean in enumerate(means, 1):
        low, high = min(values[:number]), max(values[:number])
        assert low - 1e-6 <= mean <= high + 1e-6


def test_gaps_stay_gaps_and_few_values_need_no_mean():
    assert smoothed([1.0] * 49) is None
    assert smoothed([1.0, None, math.inf] + [1.0] * 60)[:4] == [1.0, None, None, pytest.approx(1.0)]


def test_a_chart_says_how_many_points_it_shows():
    long = Curve("a", (range(10_000),), [float(number) for number in range(10_000)])
    chart = LineChart("a", "A", "Note.", (Axis("step"),), Axis("", "s"), [long])
    assert chart.note_of_points == " 1,498 of 10,000 points shown: the smallest and the largest of equal stretches."
    assert chart.words == "A, over step; a: 10000 values from 0 s to 10 ks, smallest 0 s, largest 10 ks"
    assert len(chart.to_json()["curves"][0]["y"]) == 1498
    short = LineChart("a", "A", "", (Axis("step"),), Axis("", "%"), [Curve("a", ([1],), [0.5])])
    assert short.note_of_points == ""
    assert "from 50.0%" in short.words


def test_percentiles_of_all_steps_and_of_stretches(make):
    rows = [make.row(step, step, step_time_s=float(step)) for step in range(1, 102)]
    assert step_time_percentiles(rows) == pytest.approx((51.0, 96.0, 100.0))
    stretches = stretches_of_steps(rows)
    assert [stretch.step for stretch in stretches] == [20, 40, 60, 80, 101]
    assert stretches[0].seconds[0] == pytest.approx(10.5)
    assert step_time_percentiles([]) == ()
    assert stretches_of_steps(rows[:39]) == []


def rank_row(step, rank, compute_s=1.0, stages=(0,)):
    return RankRow(
        step=step, steps=10, generation=0, rank=rank, device=f"n{rank}:cpu0", stages=list(stages),
        forward_s=[compute_s],
        backward_s=[0.0], wait_pp_s=0.0, wait_dp_s=0.0, wait_world_s=0.0, wait_device_s=0.0, hidden_dp_s=0.0,
        memory_bytes=1e9,
    )  # fmt: skip


def test_of_a_long_log_whole_windows_at_equal_distances_are_read(run_folder, monkeypatch):
    rows = [rank_row(step, rank) for step in range(10, 2010, 10) for rank in range(8)]
    path = run_folder.path / "metrics-ranks.jsonl"
    path.write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    whole = read_rank_history(run_folder.path, 8)
    assert (len(whole.windows), whole.is_whole) == (200, True)
    monkeypatch.setattr(rank_history, "READ_BYTES", path.stat().st_size // 4)
    part = read_rank_history(run_folder.path, 8)
    assert not part.is_whole
    assert 15 <= len(part.windows) <= 60
    assert all(len({row.step for row in window}) == 1 for window in part.windows)
    steps = [window[0].step for window in part.windows]
    assert steps[0] <= 20
    assert steps[-1] >= 1980


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 1)), min_size=1, max_size=12))
def test_the_slowness_of_all_ranks_is_that_of_each_rank(times):
    rows = [rank_row(10, rank, compute_s, (stage,)) for rank, (compute_s, stage) in enumerate(times)]
    ratios = slowness(rows)
    for row in rows:
        others = sorted(other.compute_s for other in rows if other.stages == row.stages and other.rank != row.rank)
        if not others:
            assert row.rank not in ratios
            continue
        middle = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2
        assert ratios[row.rank] == pytest.approx(row.compute_s / middle)
