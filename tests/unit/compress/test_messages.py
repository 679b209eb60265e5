"""Positions come back to the bit, values as far as their precision goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import (
    BLOCK,
    IndexForm,
    ValueCode,
    decode,
    decode_positions,
    decode_values,
    encode,
    encode_positions,
    encode_values,
    rounded,
)

ERROR = {ValueCode.FP32: 0.0, ValueCode.FP16: 2**-11, ValueCode.BF16: 2**-8}


def spread(numel: int, count: int, seed: int) -> Tensor:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def normal(count: int, seed: int = 0, scale: float = 1e-5) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=80, deadline=None)
@given(
    numel=st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 65_535, 65_536, 65_537, 200_000])),
    share=st.sampled_from([0.0, 0.0001, 0.001, 0.01, 0.07, 0.126, 0.5, 0.999, 1.0]),
    code=st.sampled_from(list(ValueCode)),
    seed=st.integers(0, 3),
)
@example(numel=9, share=1.0, code=ValueCode.SIGN, seed=0)
@example(numel=0, share=1.0, code=ValueCode.INT8, seed=0)
def test_a_message_comes_back(numel: int, share: float, code: ValueCode, seed: int) -> None:
    positions = spread(numel, round(share * numel), seed)
    values = normal(positions.numel(), seed)
    message = encode(positions, values, numel, code)
    assert message.numel() % 8 == 0
    # Behind another one, and with padding at its end.
    padded = torch.cat([message, message, message.new_zeros(16)])[message.numel() :]
    read, numbers = decode(padded, numel)
    assert torch.equal(read, positions)
    assert torch.equal(numbers, rounded(values, code))
    assert numbers.dtype == torch.float32


@pytest.mark.parametrize(
    ("share", "form"),
    [(0.5, IndexForm.BITMAP), (0.07, IndexForm.GAPS), (0.01, IndexForm.GAPS), (0.0002, IndexForm.SHORTS)],
)
def test_the_smallest_form_is_taken(share: float, form: IndexForm) -> None:
    numel = 2**20
    positions = spread(numel, int(share * numel), 1)
    taken, data = encode_positions(positions, numel)
    assert taken is form
    assert torch.equal(decode_positions(form, data, numel), positions)
    assert data.numel() <= min(numel // 8, 2 * positions.numel() + 64)


def test_long_gaps_are_escaped() -> None:
    numel = 70_000
    positions = torch.cat([torch.arange(5000) * 2, torch.tensor([10_254, 10_509, 10_765, 69_999])])
    form, data = encode_positions(positions, numel)
    assert form is IndexForm.GAPS
    assert torch.equal(decode_positions(form, data, numel), positions)


@pytest.mark.parametrize("code", ERROR)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1e30])
def test_precision_does_not_depend_on_the_size_of_gradients(code: ValueCode, scale: float) -> None:
    values = normal(1000, 2, scale)
    read = decode_values(encode_values(values, code), 1000, code)
    # Of fp16, numbers 2^-14 below the largest of their block lose more.
    large = values.abs() > 1e-3 * scale
    assert bool(((read - values).abs()[large] <= ERROR[code] * values.abs()[large]).all())


def test_int8_errs_by_half_a_step_of_its_block() -> None:
    values = torch.cat([normal(BLOCK, 1, 1e-6), normal(BLOCK, 2, 1.0), normal(10, 3, 1e-3)])
    read = decode_values(encode_values(values, ValueCode.INT8), values.numel(), ValueCode.INT8)
    for block, numbers in zip(values.split(BLOCK), read.split(BLOCK), strict=True):
        assert (numbers - block).abs().max() <= block.abs().max() / 127 * 0.501


def test_a_sign_stands_for_the_mean_of_its_block() -> None:
    values = torch.cat([normal(BLOCK, 1), normal(3, 2)])
    read = decode_values(encode_values(values, ValueCode.SIGN), values.numel(), ValueCode.SIGN)
    assert torch.equal(read.sign(), values.sign())
    assert read[-3:].abs().tolist() == pytest.approx([float(values[-3:].abs().mean())] * 3)


@pytest.mark.parametrize("code", list(ValueCode))
def test_zeros_stay_zeros(code: ValueCode) -> None:
    assert decode_values(encode_values(torch.zeros(300), code), 300, code).abs().sum() == 0


def test_a_message_of_another_tensor_is_refused() -> None:
    message = encode(torch.tensor([1, 5]), torch.ones(2), 10, ValueCode.BF16)
    with pytest.raises(ValueError, match="about 10 numbers arrived where one about 11"):
        decode(message, 11)
    with pytest.raises(ValueError, match="do not agree"):
        decode(message[:-8], 10)
