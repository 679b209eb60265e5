"""Who is left out where pairs of nodes do not reach each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.net.vertex_cover import EXACT_MAX_NODES, NodePair, vertex_cover

NODES = tuple(f"n{place}" for place in range(7))
ALL_PAIRS = list(combinations(NODES, 2))
pairs_of_seven = st.lists(st.sampled_from(ALL_PAIRS), unique=True, max_size=12)
some_nodes = st.sets(st.sampled_from(NODES))


def silent_among(nodes: set[str], pairs: list[NodePair]) -> list[NodePair]:
    return [pair for pair in pairs if set(pair) <= nodes]


@given(pairs=pairs_of_seven, first=some_nodes)
def test_the_rest_reach_each_other_and_no_smaller_number_would_do(pairs: list[NodePair], first: set[str]) -> None:
    out = vertex_cover(NODES, pairs, first)
    assert not silent_among(set(NODES) - set(out), pairs)
    for fewer in combinations(NODES, max(0, len(out) - 1)):
        assert not out or silent_among(set(NODES) - set(fewer), pairs)
    # Every one of them is there for a reason: with it back a pair would be silent again.
    assert all(silent_among({node, *set(NODES) - set(out)}, pairs) for node in out)


@given(pairs=pairs_of_seven, first=some_nodes, order=st.randoms())
def test_it_depends_on_nothing_but_the_nodes_and_the_pairs(pairs: list[NodePair], first: set[str], order) -> None:
    turned = [pair[::-1] if order.random() < 0.5 else pair for pair in pairs]
    order.shuffle(turned)
    assert vertex_cover(NODES, turned + turned, first) == vertex_cover(NODES, pairs, first)


@given(pairs=pairs_of_seven)
def test_who_is_out_stays_out_for_as_long_as_the_cuts_last(pairs: list[NodePair]) -> None:
    out = vertex_cover(NODES, pairs)
    assert vertex_cover(NODES, pairs, first=out) == out


@given(pairs=pairs_of_seven, healed=st.data())
def test_who_is_healed_comes_back(pairs: list[NodePair], healed: st.DataObject) -> None:
    out = vertex_cover(NODES, pairs)
    if out:
        node = healed.draw(st.sampled_from(out))
        left = [pair for pair in pairs if node not in pair]
        assert node not in vertex_cover(NODES, left, first=out)


@given(pairs=st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from([*NODES, "elsewhere"]))))
def test_what_is_no_pair_of_these_nodes_counts_for_nothing(pairs: list[NodePair]) -> None:
    real = [pair for pair in pairs if pair[0] != pair[1] and "elsewhere" not in pair]
    assert vertex_cover(NODES, pairs) == vertex_cover(NODES, real)


@pytest.mark.parametrize(
    ("pairs", "first", "out"),
    [
        ([], [], []),
        ([("n1", "n2")], [], ["n2"]),
        ([("n1", "n2")], ["n1"], ["n1"]),
        ([("n0", "n1"), ("n0", "n2")], [], ["n0"]),
        ([("n0", "n1"), ("n2", "n3")], [], ["n1", "n3"]),
        ([("n0", "n1"), ("n1", "n2"), ("n0", "n2")], [], ["n1", "n2"]),
        # Taking the latest of those with two silent partners would cost three of this chain.
        ([("n0", "n1"), ("n1", "n6"), ("n6", "n2"), ("n2", "n3")], [], ["n1", "n2"]),
        # As few as possible counts more than who is out already.
        ([("n1", "n2"), ("n1", "n3")], ["n2"], ["n1"]),
    ],
)
def test_who_goes(pairs: list[NodePair], first: list[str], out: list[str]) -> None:
    assert vertex_cover(NODES, pairs, first) == out


def test_a_switch_that_splits_a_large_cluster_takes_no_search() -> None:
    nodes = [f"n{place}" for place in range(4 * EXACT_MAX_NODES)]
    half = len(nodes) // 2
    pairs = [(a, b) for a in nodes[: half + 1] for b in nodes[half + 1 :]]
    out = vertex_cover(nodes, pairs)
    assert out == nodes[half + 1 :]
