"""Measures how fast a device does matrix products, copies and tiny operations. The clock is an argument."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Now = Callable[[], float]
WhileBusy = Callable[[], object]

MATMUL_S = 0.7
SUSTAINED_S = 5.0
"""Time limit on a GPU: long enough for heat and power limits to show."""
COPY_S = 0.3
TINY_BATCHES, TINY_OPS = 40, 25


def matmul_flops(
    device: torch.device, dtype: torch.dtype, now: Now, limit_s: float = MATMUL_S, while_busy: WhileBusy | None = None
) -> float:
    """Return FLOP/s of square matrix products, 2·size³ each. On CUDA fp32 means fp32, without TF32.

    Args:
        while_busy: called after each batch that was queued, while the device works.
    """
    size = 512 if device.type == "cpu" else 4096 if dtype == torch.float32 else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    batch = 1 if device.type == "cpu" else 8
    return rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, device, now, limit_s, batch, while_busy)


def copy_bytes_per_s(device: torch.device, now: Now, limit_s: float = COPY_S) -> float:
    """Return bytes read plus bytes written per second, in copies larger than any cache."""
    size = 64 * 2**20 if device.type == "cpu" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    batch = 1 if device.type == "cpu" else 8
    return rate(lambda: target.copy_(source), 2.0 * size, device, now, limit_s, batch)


def launch_seconds(device: torch.device, now: Now) -> float:
    """Return the median time of one tiny operation (a sum of 8 floats). CUDA is synchronized after each batch."""
    x = torch.ones(8, device=device)
    samples = []
    for _ in range(TINY_BATCHES):
        start = now()
        for _ in range(TINY_OPS):
            x + x
        _finish(device)
        samples.append((now() - start) / TINY_OPS)
    return statistics.median(samples)


def rate(
    work: Callable[[], object],
    amount: float,
    device: torch.device,
    now: Now,
    limit_s: float,
    batch: int,
    while_busy: WhileBusy | None = None,
) -> float:
    """Return the amount of work per second over `limit_s` of elapsed time, at least one batch, after one warm-up."""
    work()
    _finish(device)
    start = now()
    done = 0
    while True:
        for _ in range(batch):
            work()
        if while_busy is not None:
            while_busy()  # on CUDA the batch is queued and not done
        _finish(device)
        done += batch
        spent = now() - start
        if spent >= limit_s:
            return amount * done / spent


def _finish(device: torch.device) -> None:
    """Wait until the device is done: CUDA operations are asynchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
