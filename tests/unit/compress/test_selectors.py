"""The largest numbers are chosen, about as many as asked, and never what is zero or not a number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.select.selectors import select
from hpctrain.records.plan.compression import Selector

BY_SIZE: list[Selector] = ["exact", "sampled", "block"]


def drawn(n: int, seed: int = 0, heavy: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * 1e-5
    return values * torch.randn(n, generator=generator).exp() ** 3 if heavy else values


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5000), share=st.floats(0, 1.2), how=st.sampled_from([*BY_SIZE, "random"]))
def test_positions_ascend_and_do_not_repeat(n: int, share: float, how: Selector) -> None:
    positions = select(drawn(n, n), int(share * n), how)
    assert positions.dtype == torch.int64
    assert bool((positions.diff() > 0).all())
    assert positions.numel() == min(n, int(share * n)) or how == "block"
    if positions.numel():
        assert int(positions[0]) >= 0
        assert int(positions[-1]) < n


def test_exact_takes_the_largest() -> None:
    values = drawn(10_000)
    chosen = select(values, 700, "exact")
    assert set(chosen.tolist()) == set(values.abs().topk(700).indices.tolist())


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.6])
@pytest.mark.parametrize("n", [16_384, 300_001])
def test_sampled_takes_the_largest_and_nearly_as_many(n: int, share: float, heavy: bool) -> None:
    values = drawn(n, 1, heavy)
    k = int(share * n)
    chosen = select(values, k, "sampled", seed=5)
    assert 0.9 * k <= chosen.numel() <= 1.1 * k
    left = torch.ones(n, dtype=torch.bool)
    left[chosen] = False
    assert values[chosen].abs().min() >= values[left].abs().max()


def test_sampled_finds_the_few_rows_that_differ_from_zero() -> None:
    # As in an embedding, of which a batch reaches few rows: a sample may see none of them.
    values = torch.zeros(400, 1000)
    values[7] = drawn(1000)
    chosen = select(values.flatten(), 20_000, "sampled")
    assert chosen.tolist() == list(range(7000, 8000))


def test_block_takes_the_largest_of_every_stretch() -> None:
    values = drawn(100_000, 3)
    values[:50_000] *= 1e-3
    chosen = select(values, 5000, "block")
    assert chosen.numel() == 5000
    assert int((chosen < 50_000).sum()) == pytest.approx(2500, abs=60)


@pytest.mark.parametrize("how", BY_SIZE)
@pytest.mark.parametrize("n", [100, 100_000])
def test_zeros_are_never_chosen_and_ties_not_all_of_them(how: Selector, n: int) -> None:
    assert select(torch.zeros(n), n // 10, how).numel() == 0
    assert select(torch.zeros(n), n, how).numel() == 0
    assert select(torch.ones(n), n // 10, how).numel() <= 1.1 * (n // 10)


def test_what_is_not_a_number_does_not_make_everything_pass() -> None:
    values = drawn(100_000)
    values[::3] = torch.nan
    for how in BY_SIZE:
        assert select(values, 1000, how).numel() <= 1100


def test_random_places_follow_from_the_seed_and_not_from_the_values() -> None:
    chosen = select(drawn(10_000), 500, "random", seed=3)
    assert torch.equal(chosen, select(torch.zeros(10_000), 500, "random", seed=3))
    assert not torch.equal(chosen, select(drawn(10_000), 500, "random", seed=4))
    assert chosen.numel() == 500
