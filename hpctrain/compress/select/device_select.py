"""Selection by threshold on a GPU: with our Triton kernels where they compile, else with torch's operations."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import Tensor

ThresholdSelect = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Values [n] in fp32, contiguous, and a threshold above zero [] -> positions [k], int64, ascending, of the numbers
whose magnitude reaches it, and these numbers [k]. NaN is never selected."""


def at_least(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The positions and values whose magnitude reaches a threshold, by the faster implementation on the device; see
    `ThresholdSelect`."""
    return threshold_select(values.device)(values, threshold)


@functools.cache
def threshold_select(device: torch.device) -> ThresholdSelect:
    """The implementation for a device: our kernels on CUDA or ROCm with a working Triton, which torch's GPU wheels
    bring along; else torch's operations. Both select the same numbers."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return by_torch
    try:
        from hpctrain.compress.select import select_kernels

        # A trial run on 16 numbers, which compiles the kernels for nearly all sizes.
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
    """The implementation of `ThresholdSelect` with torch's operations."""
    positions = (values.abs() >= threshold).nonzero().flatten()
    return positions, values.index_select(0, positions)
