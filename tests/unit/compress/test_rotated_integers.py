"""Rotated integers: what is read and what is left in place add up to what was written, and the error is that of the
best levels for a normal distribution, whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK
from hpctrain.compress.codecs.rotated_integers import (
    LEVELS,
    SIDE,
    RotatedIntegerCode,
    block_signs,
    hadamard_matrix,
)

ERRORS = {1: 1 - 2 / math.pi, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Squared errors of the best levels for a standard normal distribution (Max 1960, table I)."""


def written(code: RotatedIntegerCode, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is read of a message of these, what is left, and the message."""
    message = torch.full((code.bytes_of(numbers.numel()),), 255, dtype=torch.uint8)
    left, read = numbers.clone(), torch.full_like(numbers, 9.0)
    code.write(left, message)
    without_errors = torch.zeros_like(message)
    code.write(numbers.clone(), without_errors, errors=False)
    assert torch.equal(without_errors, message)
    code.read(message, read)
    return read, left, message


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(list(LEVELS)),
    blocks=st.sampled_from([2, 512, 514]),
    exponent=st.integers(-15, 15),
    zeros=st.booleans(),
    seed=st.integers(0, 5),
)
def test_what_is_read_and_what_is_left_add_up(bits: int, blocks: int, exponent: int, zeros: bool, seed: int) -> None:
    numbers = normal(blocks, BLOCK, seed=seed) * 10.0**exponent * torch.logspace(-2, 2, blocks)[:, None]
    if zeros:
        numbers[0] = 0
    read, left, message = written(RotatedIntegerCode(bits, seed), numbers.flatten())
    norms = numbers.norm(dim=1, keepdim=True)
    assert ((read + left).view_as(numbers) - numbers).abs().le(norms * 1e-6).all()
    # No block leaves much more than the mean error; a block of zeros leaves nothing.
    assert left.view_as(numbers).norm(dim=1).le(norms[:, 0] * math.sqrt(3 * ERRORS[bits])).all()
    assert message.numel() == blocks * (2 + BLOCK * bits // 8)
    assert message.numel() % 4 == 0, "what follows a message lies at a multiple of 4 bytes"


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("numbers", ["normal", "one large", "a few", "heavy"])
def test_the_error_is_that_of_the_best_levels_whatever_the_numbers_are(bits: int, numbers: str) -> None:
    values = normal(400, BLOCK)
    match numbers:
        case "one large":
            # One number alone becomes 256 of the same size: no level fits better than 20 % off.
            values[:, 5] = 20.0
        case "a few":
            values[:, 40:] = 0.0
        case "heavy":
            values = values.pow(5)
        case _:
            assert numbers == "normal"
    _, left, _ = written(RotatedIntegerCode(bits, 0), values.flatten())
    error = float((left.view_as(values).square().sum(1) / values.square().sum(1)).mean())
    assert error == pytest.approx(ERRORS[bits], rel=0.02 if numbers == "normal" else 0.35)


def test_the_rotation_keeps_lengths_and_is_its_own_inverse_but_for_the_signs() -> None:
    matrix = hadamard_matrix(SIDE)
    assert torch.equal(matrix @ matrix.t(), SIDE * torch.eye(SIDE))
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(torch.kron(matrix, matrix), hadamard_matrix(BLOCK)), "two products with the small one"
    signs = block_signs(0)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.sum())) < 60, "about as many of both"
    assert not torch.equal(signs, block_signs(1))


@pytest.mark.parametrize("bits", LEVELS)
def test_a_message_is_the_same_in_every_run_and_read_with_its_seed_only(bits: int) -> None:
    numbers = normal(4 * BLOCK)
    read, _, message = written(RotatedIntegerCode(bits, 3), numbers)
    again, _, same = written(RotatedIntegerCode(bits, 3), numbers)
    assert torch.equal(message, same)
    assert torch.equal(read, again)
    RotatedIntegerCode(bits, 4).read(message, again)
    assert (again - numbers).norm() > numbers.norm()


@pytest.mark.parametrize("bits", LEVELS)
def test_messages_are_added_to_what_is_there(bits: int) -> None:
    code = RotatedIntegerCode(bits, 0)
    reads, messages = [], []
    for seed in range(3):
        read, _, message = written(code, normal(4 * BLOCK, seed=seed))
        reads.append(read)
        messages.append(message)
        assert code.finite(message)
    total = torch.ones(4 * BLOCK)
    code.add(messages, total)
    assert torch.allclose(total, torch.stack(reads).sum(0) + 1, atol=1e-5)


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(bits: int, bad: float) -> None:
    code = RotatedIntegerCode(bits, 0)
    numbers = normal(4, BLOCK)
    numbers[1, 7] = bad
    read, _, message = written(code, numbers.flatten())
    assert read.view(4, -1).isfinite().all(1).tolist() == [True, False, True, True]
    assert not read.view(4, -1)[1].isfinite().any()
    assert not code.finite(message)


@pytest.mark.parametrize("bits", [0, 5])
def test_no_other_width_is_taken_for_one_that_is_known(bits: int) -> None:
    with pytest.raises(ValueError, match=f"rotated integers of {bits} bits; allowed: 1 to 4"):
        RotatedIntegerCode(bits, 0)
