"""Columns become orthonormal whatever they were."""

from __future__ import annotations

import pytest
import torch

from hpctrain.compress.reducers.power_sgd import orthonormalize


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_are_orthonormal_and_span_what_they_spanned(scale: float) -> None:
    before = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    before[:, :, 3] += 1000 * before[:, :, 0]
    after = before * scale
    orthonormalize(after)
    assert torch.allclose(after.transpose(1, 2) @ after, torch.eye(5).expand(3, 5, 5), atol=1e-5)
    assert torch.allclose(after @ (after.transpose(1, 2) @ before), before, rtol=1e-4, atol=1e-2)


def test_a_column_that_carries_nothing_becomes_zero() -> None:
    columns = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(1))
    columns[0, :, 2] = 2 * columns[0, :, 0] - columns[0, :, 1]
    columns[1] = 0
    orthonormalize(columns)
    gram = columns.transpose(1, 2) @ columns
    assert torch.allclose(gram[0], torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-5)
    assert not columns[0, :, 2].any()
    assert not columns[1].any()
