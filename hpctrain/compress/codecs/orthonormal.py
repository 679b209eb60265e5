"""Orthonormalization of the columns of many thin matrices at once."""

from __future__ import annotations

import torch
from torch import Tensor

DEPENDENT = 1e-5
"""Share of its length below which a column counts as dependent after the projection of earlier columns.

What remains of such a column is mostly fp32 rounding error.
"""


def orthonormalize(matrices: Tensor) -> None:
    """Make the columns orthonormal in place; columns that depend on earlier ones become zero.

    This is Gram-Schmidt with every projection done twice, which is enough for orthogonality up to rounding (Giraud,
    Langou and Rozložník 2005). For up to about 8 columns it is faster than LAPACK's QR. A zero column stays zero; QR
    would replace it by an arbitrary direction that costs bytes and carries nothing.

    Args:
        matrices: fp32 [batch, rows, columns], rows ≥ columns.
    """
    # The matrices are scaled so that no square of an entry overflows or underflows.
    matrices /= matrices.abs().amax(dim=1, keepdim=True).clamp_min_(torch.finfo(matrices.dtype).tiny)
    for index in range(matrices.shape[2]):
        column = matrices[:, :, index : index + 1]
        length = column.norm(dim=1, keepdim=True)
        if index:
            before = matrices[:, :, :index]
            for _ in range(2):
                column -= before @ (before.transpose(1, 2) @ column)
        remainder = column.norm(dim=1, keepdim=True)
        column.copy_(torch.where(remainder > DEPENDENT * length, column / remainder, 0.0))
