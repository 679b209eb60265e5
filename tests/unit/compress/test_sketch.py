"""Count sketches are unfolded to exact sums, or say what they cannot give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.compress.codecs.sketch import PEELING_LOAD, fold, unfold
from hpctrain.compress.codecs.sparse_message import mask_of, pack_bits, positions_of, unpack_bits

NUMEL = 60_000


def _ranks(world: int, density: float, runs: bool, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Positions and numbers of each rank; numbers use all 32 bits, so that cells wrap around."""
    generator = torch.Generator().manual_seed(seed)
    count = int(density * NUMEL)
    found = []
    for _ in range(world):
        if runs:
            start = int(torch.randint(NUMEL - count, (1,), generator=generator))
            positions = torch.arange(start, start + count)
        else:
            positions = torch.randperm(NUMEL, generator=generator)[:count].sort().values
        limit = 2**31 // world
        numbers = torch.randint(-limit, limit, (count,), generator=generator).to(torch.int32)
        found.append((positions, numbers))
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 16), st.floats(0.001, 0.03), st.booleans(), st.integers(0, 2**20))
def test_the_sum_of_sketches_unfolds_to_the_sum_of_the_vectors(
    world: int, density: float, runs: bool, seed: int
) -> None:
    ranks = _ranks(world, density, runs, seed)
    exact = torch.zeros(NUMEL, dtype=torch.int64)
    for positions, numbers in ranks:
        exact.index_add_(0, positions, numbers.long())
    union = torch.cat([positions for positions, _ in ranks]).unique()
    cells = int(len(union) / 0.7) + 300
    sketches = [fold(torch.searchsorted(union, places), numbers, len(union), cells) for places, numbers in ranks]
    sums, found = unfold(torch.stack(sketches).sum(0, dtype=torch.int32), len(union), cells)
    assert found.all()
    assert (sums.long() == exact[union]).all()


@pytest.mark.parametrize(("load", "everything"), [(0.78, True), (0.9, False), (50.0, False)])
def test_what_does_not_unfold_is_told_and_never_estimated(load: float, everything: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-(2**31), 2**31, (50_000,), generator=generator).to(torch.int32)
    cells = int(len(numbers) / load)
    sketch = fold(torch.arange(len(numbers)), numbers, len(numbers), cells)
    assert len(sketch) <= cells
    sums, found = unfold(sketch, len(numbers), cells)
    assert bool(found.all()) is everything is (load < PEELING_LOAD)
    assert (sums[found] == numbers[found]).all()
    assert not sums[~found].any()


def test_nothing_unfolds_to_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    sums, found = unfold(fold(none, none.int(), 0, 3), 0, 3)
    assert len(sums) == len(found) == 0


@given(st.sets(st.integers(0, 199)), st.integers(25, 30))
def test_a_bitmap_gives_its_positions_back(positions: set[int], length: int) -> None:
    ordered = torch.tensor(sorted(positions), dtype=torch.int64)
    bitmap = pack_bits(mask_of(ordered, 8 * length))
    assert len(bitmap) == length
    assert positions_of(unpack_bits(bitmap, 8 * length)).tolist() == sorted(positions)
