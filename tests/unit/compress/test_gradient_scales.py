"""Scales of gradients: they follow rows and columns, are the same after a restart, and keep rounding errors small where
gradients are small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.rotated_integers import RotatedIntegerCode
from hpctrain.compress.reducers.gradient_scales import EVERY, GradientScales
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec

ROWS = torch.tensor([1.0, 0.05]).repeat(16)
"""Magnitudes of the rows of a matrix."""


def gradient(seed: int, columns: int = 64) -> Tensor:
    return torch.randn(32, columns, generator=torch.Generator().manual_seed(seed)) * ROWS[:, None]


def summed(codec: QuantizedBucketCodec, *tensors: Tensor) -> list[Tensor]:
    """What one rank alone gets as sums."""
    numbers = sum(tensor.numel() for tensor in tensors)
    length = codec.bytes_of(-(-numbers // codec.part_multiple) * codec.part_multiple)
    outgoing, sums = torch.empty(1, length, dtype=torch.uint8), [tensor.clone() for tensor in tensors]
    bucket = range(len(tensors))
    codec.encode(bucket, sums, outgoing)
    codec.decode(bucket, codec.reduce_part(bucket, outgoing, 0)[None], sums)
    return sums


def test_scales_follow_rows_and_columns_after_the_first_sum():
    scales, matrix, vector = GradientScales(None), gradient(0) * torch.linspace(1, 9, 64), torch.full((7,), 3.0)
    first = scales.begin("a", "mv", [matrix, vector])
    assert all(bool((scale == 1).all()) for scale in first)
    of_matrix, of_vector = scales.begin("a", "mv", [matrix, vector])
    assert of_vector.item() == 3.0
    wanted = ROWS[:, None] * torch.linspace(1, 9, 64)
    assert ((of_matrix / wanted).log().abs() < 1.1).all()
    changed = [scales.begin("a", "mv", [matrix, vector]) is not None for _ in range(3, 2 * EVERY + 2)]
    assert [number for number, new in enumerate(changed, 3) if new] == [3, 5, 9, EVERY + 1, 2 * EVERY + 1]


def test_a_gradient_that_is_not_finite_changes_no_scales():
    scales, matrix = GradientScales(None), gradient(1)
    broken = matrix.clone()
    broken[3, 5] = torch.inf
    scales.begin("a", "m", [broken])
    (after_broken,) = scales.begin("a", "m", [matrix])
    assert (after_broken == 1).all()
    (after,) = scales.begin("a", "m", [broken])
    assert (after[0] > 10 * after[1]).all()
    assert scales.begin("a", "m", [broken]) is None
    (last,) = scales.begin("a", "m", [broken])
    assert torch.equal(last, after)


def test_a_row_without_gradients_keeps_a_scale_above_zero():
    scales, matrix = GradientScales(None), gradient(2)
    matrix[4] = 0
    scales.begin("a", "mz", [matrix, torch.zeros(8, 8)])
    of_matrix, of_zeros = scales.begin("a", "mz", [matrix, torch.zeros(8, 8)])
    assert (of_matrix[4] > 0).all()
    assert (of_zeros == 1).all()


def test_small_rows_have_small_errors():
    plain, scaled = (QuantizedBucketCodec(RotatedIntegerCode(2, 0), scales) for scales in (None, GradientScales(None)))
    for step in range(6):
        errors = [(summed(codec, gradient(step))[0] - gradient(step)).square().mean(1) for codec in (plain, scaled)]
    small = ROWS < 0.1
    assert errors[1][small].mean() < 0.02 * errors[0][small].mean()
    # A number is rounded twice, and what was left of the last step is in the sum, too.
    assert (errors[1] / ROWS.square()).max() < 6 * 0.1175


def test_sums_and_residuals_together_lose_nothing():
    codec = QuantizedBucketCodec(RotatedIntegerCode(2, 0), GradientScales(None))
    steps = [(gradient(step), torch.randn(9, generator=torch.Generator().manual_seed(step))) for step in range(20)]
    applied = [sum(parts) for parts in zip(*(summed(codec, *tensors) for tensors in steps), strict=True)]
    for number, name in enumerate(("residual.0", "residual.1")):
        given = sum(tensors[number] for tensors in steps)
        left = codec.holder.state()[name].view_as(given)
        assert torch.allclose(applied[number] + left, given, atol=1e-4)


def test_a_restarted_sum_goes_on_with_the_same_scales():
    straight, began = (QuantizedBucketCodec(RotatedIntegerCode(3, 0), GradientScales(None)) for _ in range(2))
    for step in range(7):
        summed(straight, gradient(step))
        summed(began, gradient(step))
    resumed = QuantizedBucketCodec(RotatedIntegerCode(3, 0), GradientScales(None))
    resumed.holder.load_state({key: tensor.clone() for key, tensor in began.holder.state().items()})
    for step in range(7, 40):
        assert torch.equal(summed(straight, gradient(step))[0], summed(resumed, gradient(step))[0])


def test_factors_of_another_shape_are_refused():
    scales, other = GradientScales(None), GradientScales(None)
    scales.begin("a", "m", [gradient(0)])
    other.load_state(scales.state())
    with pytest.raises(CheckpointError, match=r"factors\.m: found 96 factors for a gradient with 64 rows and columns"):
        other.begin("a", "m", [gradient(0, columns=32)])
