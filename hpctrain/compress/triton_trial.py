"""Finds out whether Triton kernels work on a device, by a trial run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

Kernels = TypeVar("Kernels")


def working_kernels(device: torch.device, trial: Callable[[], Kernels], otherwise: str) -> Kernels | None:
    """Return what a trial run of Triton kernels on a device returns; None if Triton is missing or does not work.

    Kernels run on CUDA or ROCm with a working Triton, which torch's GPU wheels include. If Triton is there and does not
    work, a line on stderr says why.

    Args:
        trial: imports the kernels, runs them on a few numbers, and returns them.
        otherwise: what torch's own operations do instead, as 'choose the same numbers'.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        return trial()
    except Exception as error:  # no C compiler, no place for its cache, a GPU too old: Triton has a class for each
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"hpctrain: Triton does not work on {device} ({reason}); torch's own operations {otherwise} in more time; "
            "what Triton needs: a C compiler (CC), and a folder that it may write to (TRITON_CACHE_DIR)",
            file=sys.stderr,
        )
        return None
