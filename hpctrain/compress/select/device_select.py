"""Selection by threshold on a GPU: with hpctrain's Triton kernels if they compile, else with torch's operations."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import Tensor

ThresholdSelect = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that selects the numbers whose magnitude reaches a threshold.

It takes values [n] in fp32, contiguous, and a threshold [] above zero. It returns positions [k], int64, ascending, and
the numbers there [k]. NaN is never selected.
"""


def at_least(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and values whose magnitude reaches a threshold, by the implementation of
    `threshold_select`.
    """
    return threshold_select(values.device)(values, threshold)


@functools.cache
def threshold_select(device: torch.device) -> ThresholdSelect:
    """Return the implementation of `ThresholdSelect` for a device; all implementations select the same numbers.

    It is hpctrain's kernels on CUDA or ROCm with a working Triton, which torch's GPU wheels include; else torch's
    operations.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return by_torch
    try:
        from hpctrain.compress.select import select_kernels

        # A trial run on 16 numbers compiles the kernels for nearly all sizes.
        select_kernels.at_least(torch.zeros(16, device=device), torch.ones((), device=device))
    except Exception as error:  # no C compiler, no place for its cache, a GPU too old: Triton has a class for each
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"hpctrain: Triton does not work on {device} ({reason}); torch's own operations choose the same numbers in "
            "more time; what Triton needs: a C compiler (CC), and a folder that it may write to (TRITON_CACHE_DIR)",
            file=sys.stderr,
        )
        return by_torch
    return select_kernels.at_least


def by_torch(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Select by threshold with torch's operations; see `ThresholdSelect`."""
    positions = (values.abs() >= threshold).nonzero().flatten()
    return positions, values.index_select(0, positions)
