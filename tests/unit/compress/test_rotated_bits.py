"""Numbers of one or two bits in rotated blocks: what is read and what is left in place add up to what was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK
from hpctrain.compress.codecs.rotated_bits import RotatedBits

ERRORS = {1: (1 - 2 / torch.pi) ** 0.5, 2: 0.1175**0.5}
"""Bits -> root mean square of the rounding error of a normal distribution (Max 1960, table 1)."""


def written(code: RotatedBits, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    message = torch.zeros(code.bytes_of(numbers.numel()), dtype=torch.uint8)
    errors, read = numbers.clone(), torch.full_like(numbers, 9.0)
    code.write(errors, message)
    code.read(message, read)
    return read, errors, message


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(list(ERRORS)),
    blocks=st.sampled_from([1, 2, 511, 513]),
    exponent=st.integers(-15, 15),
    spikes=st.booleans(),
    seed=st.integers(0, 5),
)
def test_what_is_read_and_what_is_left_add_up(bits: int, blocks: int, exponent: int, spikes: bool, seed: int) -> None:
    numbers = torch.randn(blocks, BLOCK, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    numbers[0] = 0
    if spikes:
        numbers[:, 7] *= 1000
    read, errors, _ = written(RotatedBits(bits), numbers.flatten())
    length = numbers.norm(dim=1, keepdim=True)
    assert ((read + errors).view_as(numbers) - numbers).abs().le(length * 1e-6).all()
    # Never longer than the block itself: each rotated number is nearer to its level than to zero on average.
    assert errors.view_as(numbers).norm(dim=1, keepdim=True).le(length * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", ERRORS)
def test_errors_are_those_of_a_normal_distribution_whatever_the_block_holds(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    uneven = torch.randn(64, BLOCK, generator=generator) * torch.logspace(0, 2, BLOCK)
    _, errors, _ = written(RotatedBits(bits), uneven.flatten())
    ratios = errors.view(64, BLOCK).norm(dim=1) / uneven.norm(dim=1)
    assert ratios.mean() == pytest.approx(ERRORS[bits], rel=0.03)


@pytest.mark.parametrize("bits", ERRORS)
def test_messages_are_added_to_what_is_there(bits: int) -> None:
    code = RotatedBits(bits)
    numbers = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    read, _, message = written(code, numbers)
    total = torch.ones_like(numbers)
    code.add(message, total)
    assert torch.allclose(total, read + 1, atol=1e-6)
    assert message.numel() == 3 * (4 + BLOCK * bits // 8)
    assert code.finite(message)


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(bits: int, bad: float) -> None:
    code = RotatedBits(bits)
    numbers = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(2))
    numbers[1, 7] = bad
    read, _, message = written(code, numbers.flatten())
    assert read.view(3, -1).isfinite().all(1).tolist() == [True, False, True]
    assert not read.view(3, -1)[1].isfinite().any()
    assert not code.finite(message)


def test_no_other_width_is_taken() -> None:
    with pytest.raises(ValueError, match="rotated numbers of 3 bits; allowed: 1 or 2"):
        RotatedBits(3)
