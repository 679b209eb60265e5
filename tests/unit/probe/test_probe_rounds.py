"""Every pair exactly once, nobody twice in a round, the same seed gives the same schedule."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.rounds import plan_rounds, rounds


@settings(max_examples=30)
@given(n=st.integers(0, 60), seed=st.integers())
@example(n=2, seed=0)
def test_every_pair_meets_once_and_nobody_is_in_two_places(n: int, seed: int) -> None:
    schedule = rounds(n, seed)

    met = {pair for pairs in schedule for pair in pairs}
    assert len(met) == sum(map(len, schedule)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in met)
    for pairs in schedule:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == 2 * (n // 2)
    assert len(schedule) == (0 if n < 2 else n - 1 if n % 2 == 0 else n)


@pytest.mark.parametrize("n", [255, 2048])
def test_so_it_is_at_the_size_of_the_largest_clusters(n: int) -> None:
    schedule = rounds(n, 1)
    nodes = np.fromiter(itertools.chain.from_iterable(itertools.chain.from_iterable(schedule)), np.int64)
    met = nodes.reshape(len(schedule), n // 2, 2)
    paired, busy = np.zeros((n, n), dtype=bool), np.zeros((len(schedule), n), dtype=bool)
    paired[met[..., 0], met[..., 1]] = True
    busy[np.arange(len(schedule))[:, None], met.reshape(len(schedule), -1)] = True

    assert len(schedule) == (n if n % 2 else n - 1)
    assert (paired == np.triu(np.ones((n, n), dtype=bool), 1)).all(), "as many meetings as pairs, and every pair"
    assert busy.sum() == nodes.size == n * (n - 1), "nobody twice in a round"


@given(n=st.integers(2, 60), seed=st.integers())
def test_the_same_seed_gives_the_same_schedule(n: int, seed: int) -> None:
    assert rounds(n, seed) == rounds(n, seed)


def test_another_seed_gives_another_schedule() -> None:
    assert rounds(16, 1) != rounds(16, 2)


def test_few_nodes_measure_each_pair_alone_and_then_all_at_once() -> None:
    schedule = plan_rounds(4, ProbeSettings())

    alone = [step for step in schedule if step.alone]
    assert [len(step.pairs) for step in alone] == [1] * 6
    assert [len(step.pairs) for step in schedule[6:]] == [2, 2, 2]
    assert {pair for step in alone for pair in step.pairs} == {
        (min(pair), max(pair)) for step in schedule[6:] for pair in step.pairs
    }


def test_many_nodes_measure_in_full_rounds_only() -> None:
    assert not any(step.alone for step in plan_rounds(9, ProbeSettings()))


def test_three_nodes_have_one_pair_a_round_anyway() -> None:
    assert len(plan_rounds(3, ProbeSettings())) == 3


@pytest.mark.parametrize("n", [1, 2, 7, 16, 100, 1000])
def test_a_health_probe_has_15_rounds_at_any_size_or_all_there_are(n: int) -> None:
    schedule = plan_rounds(n, ProbeSettings(mode="health"))

    assert len(schedule) == min(15, len(rounds(n, 0)))
    assert [sorted(sorted(pair) for pair in step.pairs) for step in schedule] == [
        sorted(sorted(pair) for pair in met) for met in rounds(n, 0)[:15]
    ]


def test_as_many_rounds_as_asked_for_are_the_first_ones() -> None:
    assert rounds(20, 3, most=4) == rounds(20, 3)[:4]
