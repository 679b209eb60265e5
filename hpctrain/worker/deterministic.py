"""Settings of torch with which two runs of one plan give equal weights, bit by bit."""

from __future__ import annotations

import os

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""The faster of the two settings with which cuBLAS is deterministic."""


def make_deterministic() -> None:
    """Make torch choose deterministic algorithms. Call this before anything runs on a CUDA device.

    An operation without a deterministic algorithm raises an error that names it. The order of samples, the initial
    weights and sums over ranks need no setting: with one plan they are always deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
