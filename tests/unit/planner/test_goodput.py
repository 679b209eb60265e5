"""Goodput under failures against Young's and Daly's formulas, and how ways of recovery compare."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpctrain.planner.simulate.goodput import FailureModel, daly_goodput, daly_interval, simulate_goodput

LARGE = FailureModel(nodes=1250, node_mtbf_s=6300 * 3600.0, stall_s=30.0, save_s=30.0, recover_s=300.0)
MONTH = 30 * 86400.0


@pytest.mark.parametrize("interval_s", [300.0, 1800.0, 7200.0])
def test_the_simulation_meets_dalys_expectation(interval_s):
    found = simulate_goodput(LARGE, "requeue", [interval_s], MONTH, 60, 0)[0]
    assert found.mean == pytest.approx(daly_goodput(LARGE, interval_s), abs=0.01)
    assert found.p05 <= found.mean
    assert found.failures == pytest.approx(MONTH * 1250 / (6300 * 3600), rel=0.05)


def test_the_best_interval_is_dalys():
    best = daly_interval(LARGE)
    assert best == pytest.approx(math.sqrt(2 * 30 * 6300 * 3600 / 1250) - 30)
    around = [best / 4, best / 2, best, best * 2, best * 4]
    found = simulate_goodput(LARGE, "requeue", around, MONTH, 60, 1)
    assert max(found, key=lambda each: each.mean).interval_s in around[1:4]
    assert daly_goodput(LARGE, best) > max(daly_goodput(LARGE, best * 0.7), daly_goodput(LARGE, best * 1.4))


def test_the_same_seed_gives_the_same_months():
    first, again, other = (simulate_goodput(LARGE, "in_place", [600.0], MONTH, 5, seed) for seed in (3, 3, 4))
    assert first == again != other


def test_spares_beat_going_on_with_fewer_and_both_beat_a_long_queue():
    cluster = replace(LARGE, queue_s=3600.0, spares=40)
    requeue, in_place, spares = (
        simulate_goodput(cluster, mode, [600.0], MONTH, 20, 0)[0].mean for mode in ("requeue", "in_place", "spares")
    )
    assert requeue < in_place < spares


def test_nodes_that_come_back_help_and_too_few_nodes_go_through_the_queue():
    gone = simulate_goodput(LARGE, "in_place", [600.0], MONTH, 20, 0)[0].mean
    back = simulate_goodput(replace(LARGE, repair_s=86400.0), "in_place", [600.0], MONTH, 20, 0)[0].mean
    assert back > gone
    strict = replace(LARGE, min_nodes=1250, queue_s=3600.0)
    whole = simulate_goodput(strict, "in_place", [600.0], MONTH, 20, 0)[0].mean
    assert whole == simulate_goodput(strict, "requeue", [600.0], MONTH, 20, 0)[0].mean


def test_a_small_job_without_a_queue_ends_when_its_nodes_are_gone():
    few = replace(LARGE, nodes=2, node_mtbf_s=86400.0, queue_s=math.inf)
    assert simulate_goodput(few, "in_place", [600.0], MONTH, 10, 0)[0].mean < 0.2


def test_without_failures_only_the_stalls_are_lost():
    calm = replace(LARGE, node_mtbf_s=1e15)
    assert simulate_goodput(calm, "in_place", [570.0], MONTH, 2, 0)[0].mean == pytest.approx(0.95, abs=1e-3)


def test_a_cluster_that_never_gets_to_a_checkpoint_makes_nothing():
    hopeless = replace(LARGE, node_mtbf_s=1250.0)
    assert simulate_goodput(hopeless, "requeue", [3600.0], 86400.0, 2, 0)[0].mean == pytest.approx(0, abs=1e-3)
    assert daly_goodput(hopeless, 3600.0) == pytest.approx(0, abs=1e-6)
