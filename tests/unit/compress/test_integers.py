"""Integers with a scale a block: what is read and what is left in place add up to what was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK, FEWEST_BITS, MOST_BITS, IntegerCode

LEVELS = {bits: 2 ** (bits - 1) - 1 for bits in range(FEWEST_BITS, MOST_BITS + 1)}


def written(code: IntegerCode, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is read of a message of these, what is left, and the message."""
    message = torch.zeros(code.bytes_of(numbers.numel()), dtype=torch.uint8)
    left, read = numbers.clone(), torch.full_like(numbers, 9.0)
    code.write(left, message)
    without_errors = torch.zeros_like(message)
    code.write(numbers.clone(), without_errors, errors=False)
    assert torch.equal(without_errors, message)
    code.read(message, read)
    return read, left, message


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(list(LEVELS)),
    blocks=st.sampled_from([1, 2, 511, 512, 513]),
    exponent=st.integers(-30, 30),
    zeros=st.booleans(),
    seed=st.integers(0, 5),
)
def test_what_is_read_and_what_is_left_add_up(bits: int, blocks: int, exponent: int, zeros: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(blocks, BLOCK, generator=generator) * 10.0**exponent
    numbers *= torch.logspace(-3, 3, blocks)[:, None]
    if zeros:
        numbers[0] = 0
    read, left, _ = written(IntegerCode(bits), numbers.flatten())
    largest = numbers.abs().amax(1, keepdim=True)
    # In the last bits of the largest number of its block.
    assert ((read + left).view_as(numbers) - numbers).abs().le(largest * 2e-7).all()
    assert left.view_as(numbers).abs().le(largest * (0.5 / LEVELS[bits]) * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", LEVELS)
def test_messages_are_added_to_what_is_there(bits: int) -> None:
    code = IntegerCode(bits)
    numbers = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    read, _, message = written(code, numbers)
    total = torch.ones_like(numbers)
    code.add([message], total)
    assert torch.allclose(total, read + 1, atol=1e-6)
    assert message.numel() == 3 * (4 + BLOCK * bits // 8)
    assert code.finite(message)
    again, left, _ = written(code, read)
    assert torch.allclose(again, read, rtol=1e-6)
    assert left.abs().max() <= 1e-6, "what was read is written without loss"


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(bits: int, bad: float) -> None:
    code = IntegerCode(bits)
    numbers = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(2))
    numbers[1, 7] = bad
    read, _, message = written(code, numbers.flatten())
    assert read.view(3, -1).isfinite().all(1).tolist() == [True, False, True]
    assert not read.view(3, -1)[1].isfinite().any()
    assert not code.finite(message)


@pytest.mark.parametrize("bits", [1, 9])
def test_no_other_width_is_taken_for_one_that_is_known(bits: int) -> None:
    with pytest.raises(ValueError, match=f"integers of {bits} bits; allowed: 2 to 8"):
        IntegerCode(bits)
