"""The same weights from the same run, bit by bit: what of torch has to be told so."""

from __future__ import annotations

import os

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""One of the two settings with which cuBLAS gives the same sums every time, the faster one."""


def make_deterministic() -> None:
    """Choose the repeatable form of every operation. Call it before anything runs on a CUDA device.

    An operation that has no such form raises an error that names it. Order of samples, initial weights and sums over
    ranks are repeatable anyway, on the same plan.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
