"""Switches out of latencies, by themselves: clusters, the valley between near and far, what Slurm tells."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hpctrain.probe.pair_selection.rounds import contention_rounds
from hpctrain.probe.pair_selection.switches import SwitchGroups, declared_tree, infer_tree, near_limit, next_round
from tools.probe_simulation.tables import pair_f1


def distances(leaf: np.ndarray, gap: float, noise: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = 1e-5 * (1 + gap * (leaf[:, None] != leaf[None, :])) * (1 + noise * rng.standard_normal((len(leaf),) * 2))
    made = (made + made.T) / 2
    np.fill_diagonal(made, np.nan)
    return made


@pytest.mark.parametrize("sizes", [[3, 9], [8, 8], [5, 12, 7], [4, 4, 4, 4], [10, 2, 10]])
@pytest.mark.parametrize("slow", [0.0, 5e-6])
def test_leaves_of_any_sizes_are_found_whatever_one_node_adds(sizes: list[int], slow: float) -> None:
    seed = 3
    leaf = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    measured = distances(leaf, gap=0.25, noise=0.01, seed=seed)
    measured[0] += slow
    measured[:, 0] += slow

    tree = infer_tree(measured)

    assert pair_f1(tree.levels[0], leaf) == 1.0


@pytest.mark.parametrize("gap", [0.0, 0.03])
def test_no_switches_where_latencies_do_not_tell_them(gap: float) -> None:
    assert infer_tree(distances(np.arange(40) // 8, gap, noise=0.03, seed=1)).levels == ()


def test_lost_nodes_and_missing_pairs_are_passed_over() -> None:
    leaf = np.arange(24) // 8
    measured = distances(leaf, 0.25, 0.01, 0)
    measured[3] = measured[:, 3] = np.nan
    measured[1, 9] = measured[9, 1] = np.nan

    labels = infer_tree(measured).levels[0]

    assert labels[3] == -1
    kept = np.delete(np.arange(24), 3)
    assert pair_f1(labels[kept], leaf[kept]) == 1.0


def test_the_valley_is_between_near_and_far() -> None:
    leaf = np.arange(60) // 10
    limit = near_limit(distances(leaf, 0.2, 0.01, 0))

    assert limit is not None
    assert 1.05e-5 < limit < 1.15e-5
    assert near_limit(distances(leaf, 0.0, 0.01, 0)) is None


def test_further_rounds_ask_only_what_is_not_known() -> None:
    leaf = np.arange(64) // 8
    full = distances(leaf, 0.25, 0.005, 0)
    rng = random.Random(0)
    known = np.full_like(full, np.nan)
    for _ in range(500):
        a, b = rng.sample(range(64), 2)
        known[a, b] = known[b, a] = full[a, b]
    asked, rounds = int(np.isfinite(known).sum()) // 2, 0
    while met := next_round(SwitchGroups(known, np.ones(64, dtype=bool)), rng):
        assert len({node for pair in met for node in pair}) == 2 * len(met)
        assert not any(np.isfinite(known[pair]) for pair in met)
        for a, b in met:
            known[a, b] = known[b, a] = full[a, b]
        asked, rounds = asked + len(met), rounds + 1

    assert pair_f1(SwitchGroups(known, np.ones(64, dtype=bool)).labels, leaf) == 1.0
    assert asked < 64 * 63 / 2 / 2


def test_slurms_words_are_levels_from_the_leaf_up() -> None:
    told = declared_tree([["top", "s1", "a"], ["top", "s1", "a"], ["top", "s1", "b"], ["top", "s2", "c"], []], "slurm")

    assert [list(level) for level in told.levels] == [[0, 0, 1, 2, -1], [0, 0, 0, 1, -1]]
    assert told.source == "slurm"
    assert declared_tree([(), ()], "slurm").levels == ()


def test_a_level_is_filled_by_siblings_only_and_nobody_is_in_two_pairs() -> None:
    tree = declared_tree([["top", f"p{index // 8}", f"l{index // 4}"] for index in range(16)], "slurm")

    planned = contention_rounds(tree, range(16), seed=0)

    assert {step.alone for step in planned} == {True, False}
    for step in planned:
        busy = [node for pair in step.pairs for node in pair]
        assert len(busy) == len(set(busy))
        crossed = {int(tree.pair_levels[pair]) for pair in step.pairs}
        assert len(crossed) == 1, "either leaves of one pod, or pods"
