"""Settings of torch with which the same run gives the same weights, bit by bit."""

from __future__ import annotations

import os

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""The faster of the two settings with which cuBLAS is deterministic."""


def make_deterministic() -> None:
    """Make torch choose deterministic algorithms. Call this before anything runs on a CUDA device.

    An operation without a deterministic algorithm raises an error that names it. With the same plan, the order of
    samples, the initial weights and sums over ranks are deterministic anyway.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
