"""Measures how fast a device does matrix products, copies and tiny operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WhileBusy = Callable[[], object]

MATMUL_S = 0.7
SUSTAINED_S = 5.0
"""Time limit in seconds on a GPU: long enough for heat and power limits to show."""
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
    """Return FLOP/s of square matrix products, which count 2·size³ FLOP each. On CUDA fp32 means fp32, without TF32."""
    size = 512 if timer.device.type == "cpu" else 4096 if dtype == torch.float32 else 8192
    a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return timer.rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, limit_s, while_busy=while_busy)


def copy_bytes_per_s(timer: DeviceTimer, limit_s: float = COPY_S) -> float:
    """Return bytes read plus bytes written per second, in copies larger than any cache."""
    device = timer.device
    size = 64 * 2**20 if device.type == "cpu" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timer.rate(lambda: target.copy_(source), 2.0 * size, limit_s)


def launch_seconds(timer: DeviceTimer) -> float:
    """Return the median seconds of one tiny operation (a sum of 8 floats). CUDA is synchronized after each batch."""
    x = torch.ones(8, device=timer.device)
    samples = []
    for _ in range(TINY_BATCHES):
        start = timer.now()
        for _ in range(TINY_OPS):
            x + x
        timer.finish()
        samples.append((timer.now() - start) / TINY_OPS)
    return statistics.median(samples)
