"""Measures how fast a device does matrix products, copies, tiny operations and gradient compression.

The codecs' own code is timed on one matrix, without messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.compress.codecs.integers import IntegerCode
from hpctrain.compress.codecs.rotated_integers import RotatedIntegerCode
from hpctrain.compress.codecs.sparse_message import ValueCode, decode, encode, rounded
from hpctrain.compress.collectives.sparse_state import ErrorFeedback
from hpctrain.compress.reducers.power_sgd import MatrixBatch, orthonormalize
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.reduce_scatter_all_gather import Bf16BucketCodec, BucketCodec
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.records.plan.low_rank import MEASURED_RANK
from hpctrain.records.topology.topology import CodecSeconds

WhileBusy = Callable[[], object]
"""A function that is called while the device works."""

MATMUL_S = 0.7
"""Default seconds of matrix products in one dtype."""
SUSTAINED_S = 5.0
"""Seconds of matrix products in 16 bits on a GPU: long enough for heat and power limits to show."""
COPY_S = 0.3
TINY_BATCHES, TINY_OPS = 40, 25


@dataclass(frozen=True)
class DeviceTimer:
    """Measures the time of work on a device by the host's clock."""

    device: torch.device
    now: Callable[[], float] = time.perf_counter

    @property
    def batch(self) -> int:
        """Number of operations to queue at a time: on CUDA enough that the device never waits for the program."""
        return 1 if self.device.type == "cpu" else 8

    def rate(
        self,
        work: Callable[[], object],
        amount: float,
        limit_s: float,
        batch: int | None = None,
        while_busy: WhileBusy | None = None,
    ) -> float:
        """Return the amount of work per second over `limit_s` of elapsed time, after one warm-up; at least one batch
        runs.

        Args:
            work: one operation.
            amount: amount of work in one operation.
            batch: operations to queue at a time; None: the default of the device.
            while_busy: called after each batch that was queued, while the device works.
        """
        work()
        self.finish()
        start = self.now()
        done = 0
        while True:
            for _ in range(batch or self.batch):
                work()
            if while_busy is not None:
                while_busy()  # on CUDA the batch is queued but not finished
            self.finish()
            done += batch or self.batch
            spent = self.now() - start
            if spent >= limit_s:
                return amount * done / spent

    def finish(self) -> None:
        """Wait until the device has finished: CUDA operations are asynchronous."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matmul_flops(
    timer: DeviceTimer, dtype: torch.dtype, limit_s: float = MATMUL_S, while_busy: WhileBusy | None = None
) -> float:
    """Return FLOP/s of square matrix products, which count 2·size³ FLOP each. On CUDA fp32 means fp32, without TF32.

    Args:
        limit_s: seconds to measure.
        while_busy: called while the device multiplies.
    """
    size = 512 if timer.device.type == "cpu" else 4096 if dtype == torch.float32 else 8192
    a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return timer.rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, limit_s, while_busy=while_busy)


def copy_bytes_per_s(timer: DeviceTimer, limit_s: float = COPY_S) -> float:
    """Return bytes read plus bytes written per second, in copies larger than any cache, repeated for `limit_s`
    seconds."""
    device = timer.device
    size = 64 * 2**20 if device.type == "cpu" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timer.rate(lambda: target.copy_(source), 2.0 * size, limit_s)


def launch_seconds(timer: DeviceTimer) -> float:
    """Return the seconds of one tiny operation (8 additions of floats): the median over batches of operations, each of
    which ends with a synchronization of CUDA.
    """
    x = torch.ones(8, device=timer.device)
    samples = []
    for _ in range(TINY_BATCHES):
        start = timer.now()
        for _ in range(TINY_OPS):
            x + x
        timer.finish()
        samples.append((timer.now() - start) / TINY_OPS)
    return statistics.median(samples)


SIDE = 2048
"""Side of the square matrix: 16 MB in fp32, as in models of 10^9 parameters, and more than any processor's L2 cache."""
DENSITY = 0.07
"""Density of top-k."""
WORLD = 4
"""Number of ranks whose parts are added up."""
CODEC_S = 0.15
"""Time limit for each codec in seconds.

Including the first calls, all codecs together take less than a second, unless Triton compiles the selector's kernels on
a GPU.
"""


def codec_seconds(timer: DeviceTimer, limit_s: float = CODEC_S) -> CodecSeconds:
    """Return for each codec the seconds of a device's work for one number of a gradient, without messages.

    Args:
        limit_s: seconds to measure each codec.
    """
    gradient = torch.randn(SIDE, SIDE, device=timer.device).mul_(1e-5)
    works = {
        "bf16": _dense(gradient, Bf16BucketCodec()),
        "quantized": _dense(gradient, QuantizedBucketCodec(IntegerCode(4))),
        "rotated": _dense(gradient, QuantizedBucketCodec(RotatedIntegerCode(3, seed=0), feedback=False)),
        "topk": _topk(gradient),
        "power_sgd": _power_sgd(gradient),
    }
    numbers = float(gradient.numel())
    return CodecSeconds(**{name: 1 / timer.rate(work, numbers, limit_s) for name, work in works.items()})


def _dense(gradient: Tensor, codec: BucketCodec) -> Callable[[], object]:
    """Return a function that does one rank's work for a gradient with a dense codec: encode, add up the parts of
    `WORLD` ranks, encode the sums and decode them."""
    parts = torch.empty(WORLD, codec.bytes_of(gradient.numel() // WORLD), dtype=torch.uint8, device=gradient.device)

    def work() -> None:
        codec.encode([0], [gradient], parts)
        codec.reduce_part([0], parts, 0)
        codec.decode([0], parts, [gradient])

    return work


def _topk(gradient: Tensor) -> Callable[[], object]:
    """Return a function that does one rank's work for a gradient with top-k: add the residual, select, encode, store
    the new residual, decode, and add the decoded numbers to a vector of zeros."""
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
    """Return a function that does one rank's work for a gradient with PowerSGD: the two products with the residual,
    orthonormalize, store the residual, and write the product of the thin matrices into the gradient."""
    p, q, fresh = (torch.randn(1, SIDE, MEASURED_RANK, device=gradient.device) for _ in range(3))
    matrices = MatrixBatch([0], p, q, fresh, torch.zeros_like(gradient)[None])

    def work() -> None:
        matrices.project([gradient])
        orthonormalize(matrices.p)
        matrices.project_back([gradient])
        matrices.subtract_product()
        torch.mm(p[0], q[0].T, out=gradient)

    return work
