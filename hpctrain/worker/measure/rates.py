"""How fast a device does one thing: matrix products, copies, tiny operations. Time comes in as an argument."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Now = Callable[[], float]
WhileBusy = Callable[[], object]

MATMUL_S = 0.7
SUSTAINED_S = 5.0
"""On a GPU: long enough for heat and power limits to show."""
COPY_S = 0.3
TINY_BATCHES, TINY_OPS = 40, 25


def matmul_flops(
    device: torch.device, dtype: torch.dtype, now: Now, limit_s: float = MATMUL_S, while_busy: WhileBusy | None = None
) -> float:
    """FLOP/s of square matrix products, 2·size³ each. On CUDA fp32 means fp32, without TF32.

    Args:
        while_busy: called again and again while the device is at work.
    """
    size = 512 if device.type == "cpu" else 4096 if dtype == torch.float32 else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    batch = 1 if device.type == "cpu" else 8
    return rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, device, now, limit_s, batch, while_busy)


def copy_bytes_per_s(device: torch.device, now: Now, limit_s: float = COPY_S) -> float:
    """Bytes read plus bytes written, each second, by copies that no cache holds."""
    size = 64 * 2**20 if device.type == "cpu" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    batch = 1 if device.type == "cpu" else 8
    return rate(lambda: target.copy_(source), 2.0 * size, device, now, limit_s, batch)


def launch_seconds(device: torch.device, now: Now) -> float:
    """Median time of one operation too small to matter (a sum of 8 floats), each batch waited for on CUDA."""
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
    """Amount of work each second over `limit_s` of elapsed time, at least one batch, after one warm-up."""
    work()
    _finish(device)
    start = now()
    done = 0
    while True:
        for _ in range(batch):
            work()
        if while_busy is not None:
            while_busy()  # CUDA has taken the batch and is not done with it
        _finish(device)
        done += batch
        spent = now() - start
        if spent >= limit_s:
            return amount * done / spent


def _finish(device: torch.device) -> None:
    """CUDA works behind the program's back: wait until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
