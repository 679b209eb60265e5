"""Which share of each layer is sent: from variances to sparsities, equation (3), and to counts, equation (4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

VarianceForm = Literal["ours", "paper"]
DensityMapping = Literal["linear", "log", "rank"]


def sparsities(
    variances: Sequence[float],
    sizes: Sequence[int],
    limits: tuple[float, float] = (0.7, 0.95),
    mapping: DensityMapping = "linear",
    form: VarianceForm = "ours",
) -> list[float]:
    """The share of each layer that is not sent, s: the more a layer's gradients vary, the smaller.

    A layer whose variance is not a number, or infinite, counts as the one that varies most. Where all vary alike,
    equation (3) is 0/0, and s is the upper limit for all.

    Args:
        variances: σ² of each layer, as equation (2) has it: a sum over its numbers.
        sizes: numbers of each layer.
        limits: s_min and s_max.
        mapping: linear: equation (3). log: the same of the logarithms. rank: by the order only; layers that vary alike
            have the same place.
        form: ours: σ² is divided by the size, because else the largest tensor takes the maximum and leaves all others
            at s_max. paper: it is not.
    """
    lowest, highest = limits
    known = [
        variance / (size if form == "ours" else 1) if math.isfinite(variance) else math.inf
        for variance, size in zip(variances, sizes, strict=True)
    ]
    return [min(highest, max(lowest, highest - (highest - lowest) * height)) for height in _heights(known, mapping)]


def counts(sparsity: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """How many numbers of each layer are sent, k: equation (4).

    Args:
        sparsity: s of each layer.
        sizes: numbers of each layer.
    """
    # 1 − 0.95 is a little more than 0.05, which must not round up to one number more.
    return [min(size, math.ceil((1 - share) * size * (1 - 1e-12))) for share, size in zip(sparsity, sizes, strict=True)]


def _heights(variances: list[float], mapping: DensityMapping) -> list[float]:
    """Where each variance stands between the smallest, 0, and the largest, 1."""
    finite = [variance for variance in variances if variance < math.inf]
    if mapping == "rank":
        order = sorted(set(variances))
        return [order.index(variance) / max(1, len(order) - 1) for variance in variances]
    if mapping == "log":
        # The logarithm of zero is nowhere: a layer without variance stands with the smallest that has one.
        positive = [variance for variance in finite if variance > 0]
        floor = min(positive, default=1.0)
        variances = [math.log(max(variance, floor)) for variance in variances]
        finite = [variance for variance in variances if variance < math.inf]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    return [1.0 if variance == math.inf else (variance - low) / span if span > 0 else 0.0 for variance in variances]
