"""Measures the time of gradient compression on a device: the codecs' own code on one matrix, without messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import ValueCode, decode, encode, rounded
from hpctrain.compress.collectives.sparse_state import ErrorFeedback
from hpctrain.compress.reducers.bf16 import Bf16BucketCodec
from hpctrain.compress.reducers.power_sgd import MatrixBatch, orthonormalize
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.reduce_scatter_all_gather import BucketCodec
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.records.topology.topology import CodecSeconds
from hpctrain.worker.measure.rates import DeviceTimer

SIDE = 2048
"""Side of the square matrix: 16 MB in fp32, as in models of 10^9 parameters, and more than any processor's L2 cache."""
DENSITY = 0.07
RANK = 4
WORLD = 4
"""Number of ranks whose parts are added up."""
CODEC_S = 0.15
"""Time limit for each codec in seconds.

Including the first calls, all codecs together take less than a second, unless Triton compiles the selector's kernels on
a GPU.
"""


def codec_seconds(timer: DeviceTimer, limit_s: float = CODEC_S) -> CodecSeconds:
    """Return the seconds per number of a gradient for each codec."""
    gradient = torch.randn(SIDE, SIDE, device=timer.device).mul_(1e-5)
    works = {
        "bf16": _dense(gradient, Bf16BucketCodec()),
        "quantized": _dense(gradient, QuantizedBucketCodec(4)),
        "topk": _topk(gradient),
        "power_sgd": _power_sgd(gradient),
    }
    numbers = float(gradient.numel())
    return CodecSeconds(**{name: 1 / timer.rate(work, numbers, limit_s) for name, work in works.items()})


def _dense(gradient: Tensor, codec: BucketCodec) -> Callable[[], object]:
    """Return a function that encodes, adds up the parts of `WORLD` ranks, encodes the sums and decodes them."""
    parts = torch.empty(WORLD, codec.bytes_of(gradient.numel() // WORLD), dtype=torch.uint8, device=gradient.device)

    def work() -> None:
        codec.encode([0], [gradient], parts)
        codec.reduce_part([0], parts, 0)
        codec.decode([0], parts, [gradient])

    return work


def _topk(gradient: Tensor) -> Callable[[], object]:
    """Return a function that adds the residual, selects, encodes, stores the new residual, decodes and applies."""
    flat, total = gradient.view(-1), torch.empty(gradient.numel(), device=gradient.device)
    feedback = ErrorFeedback()

    def work() -> None:
        with_residual = feedback.add("0", flat)
        positions, values = select_with_values(with_residual, round(DENSITY * flat.numel()), "sampled")
        message = encode(positions, values, flat.numel(), ValueCode.BF16)
        feedback.store_residual("0", with_residual, positions, rounded(values, ValueCode.BF16))
        total.zero_().index_add_(0, *decode(message, flat.numel()))

    return work


def _power_sgd(gradient: Tensor) -> Callable[[], object]:
    """Return a function that does the two products with the residual, orthonormalizes, stores the residual and
    applies.
    """
    p, q, fresh = (torch.randn(1, SIDE, RANK, device=gradient.device) for _ in range(3))
    matrices = MatrixBatch([0], p, q, fresh, torch.zeros_like(gradient)[None])

    def work() -> None:
        matrices.project([gradient])
        orthonormalize(matrices.p)
        matrices.project_back([gradient])
        matrices.apply([gradient])

    return work
