"""How many numbers of each layer mode adaptive sends: equation (3) of the paper turns variances into sparsities,
equation (4) sparsities into counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.records.plan.compression import DensityMapping, VarianceForm


def sparsities(
    variances: Sequence[float],
    sizes: Sequence[int],
    limits: tuple[float, float] = (0.7, 0.95),
    mapping: DensityMapping = "linear",
    form: VarianceForm = "ours",
) -> list[float]:
    """Return the sparsity s of each layer by equation (3) of the paper: the share of its numbers that is not sent.

    The more a layer's gradients vary, the smaller is s. A layer whose variance is NaN or infinite counts as the one
    that varies most. If all variances are equal, equation (3) is 0/0, and s is the upper limit for all layers.

    Args:
        variances: σ² of each layer by equation (2), a sum over its numbers.
        sizes: count of numbers of each layer.
        limits: s_min and s_max.
        mapping: linear: equation (3). log: equation (3) with the logarithms of the variances. rank: by order only;
            layers with equal variances have the same rank.
        form: ours: σ² is divided by the size, because otherwise the largest tensor has by far the largest σ², and all
            others get about s_max. paper: σ² is not divided.
    """
    lowest, highest = limits
    known = [
        variance / (size if form == "ours" else 1) if math.isfinite(variance) else math.inf
        for variance, size in zip(variances, sizes, strict=True)
    ]
    return [min(highest, max(lowest, highest - (highest - lowest) * height)) for height in _heights(known, mapping)]


def counts(sparsity: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the count k of numbers to send of each layer, by equation (4) of the paper.

    Args:
        sparsity: for each layer, the share of its numbers that is not sent.
        sizes: count of numbers of each layer.
    """
    # In floating point 1 − 0.95 is slightly above 0.05; that must not round up to one more number.
    return [min(size, math.ceil((1 - share) * size * (1 - 1e-12))) for share, size in zip(sparsity, sizes, strict=True)]


def _heights(variances: list[float], mapping: DensityMapping) -> list[float]:
    """Return the position of each variance on a scale from 0 to 1. The smallest variance has position 0. The largest
    finite variance has position 1, and so has infinity, except that with the mapping `rank` only the largest value of
    all has 1.

    Args:
        variances: at least 0, or infinity.
        mapping: the scale: linear, logarithmic, or the place in ascending order (`rank`).
    """
    finite = [variance for variance in variances if variance < math.inf]
    if mapping == "rank":
        order = sorted(set(variances))
        return [order.index(variance) / max(1, len(order) - 1) for variance in variances]
    if mapping == "log":
        # Zero has no logarithm, so a layer without variance gets the smallest positive variance.
        positive = [variance for variance in finite if variance > 0]
        floor = min(positive, default=1.0)
        variances = [math.log(max(variance, floor)) for variance in variances]
        finite = [variance for variance in variances if variance < math.inf]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    return [1.0 if variance == math.inf else (variance - low) / span if span > 0 else 0.0 for variance in variances]
