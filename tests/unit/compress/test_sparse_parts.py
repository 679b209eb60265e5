"""Tensors are cut into parts that have the same to send."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.compress.collectives.exchange import balanced_borders


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(2, 9),
)
def test_borders_ascend_and_share_the_load(layers: list[tuple[int, float]], world: int) -> None:
    sizes = [size for size, _ in layers]
    loads = [round(size * share) for size, share in layers]
    borders = balanced_borders(loads, sizes, world)
    assert len(borders) == world + 1
    assert borders[0] == 0
    assert borders[-1] == sum(sizes)
    assert borders == sorted(borders)
    even = loads if sum(loads) else sizes
    for start, end in pairwise(borders):
        # A border lies between two numbers, which may stand for one number sent each at most.
        assert abs(load_of(start, end, even, sizes) - sum(even) / world) <= 2


def load_of(start: int, end: int, loads: list[int], sizes: list[int]) -> float:
    total, before = 0.0, 0
    for load, size in zip(loads, sizes, strict=True):
        total += load * max(0, min(end, before + size) - max(start, before)) / size
        before += size
    return total


def test_a_dense_layer_has_more_owners() -> None:
    assert balanced_borders([300, 100], [1000, 1000], 4) == [0, 333, 666, 1000, 2000]
