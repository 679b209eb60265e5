"""Selectors: rules that pick about k numbers of a gradient to send, the largest ones or random ones.

The selector `sampled` estimates a threshold from a random sample, because an exact `torch.topk` over a gradient takes
about ten times as long (docs/results/compression.md). So the count is only near k and differs between ranks, and each
exchange of messages sends sizes first.

On a GPU, hpctrain's Triton kernels select by threshold if they compile, else torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpctrain.compress.triton_trial import working_kernels
from hpctrain.records.plan.compression import Selector

ThresholdSelect = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that selects the numbers whose magnitude reaches a threshold.

It takes values [n] in fp32, contiguous, and a threshold [] above zero. It returns the positions [k], int64, ascending,
and the numbers at these positions [k]. NaN is never selected.
"""


@functools.cache
def threshold_select(device: torch.device) -> ThresholdSelect:
    """Return the function that selects by threshold on a device; every such function selects the same numbers.

    On a GPU where Triton works, the function is hpctrain's kernels; otherwise torch's operations.
    """

    def trial() -> ThresholdSelect:
        from hpctrain.compress.select import select_kernels

        # A trial run on 16 numbers compiles the kernels for nearly all sizes.
        select_kernels.at_least(torch.zeros(16, device=device), torch.ones((), device=device))
        return select_kernels.at_least

    return working_kernels(device, trial, "choose the same numbers") or by_torch


def by_torch(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions [k], int64, ascending, and the values [k] of the numbers whose magnitude is at least
    `threshold`, computed with torch's own operations.

    Args:
        values: [n].
        threshold: a single number.
    """
    positions = (values.abs() >= threshold).nonzero().flatten()
    return positions, values.index_select(0, positions)


TOLERANCE = 0.1
"""Largest deviation of the count that `sampled` selects from the wanted count k, as a share of k."""
CHUNK = 65536
"""Count of numbers that are processed at a time on a CPU, so that intermediate results stay in the L2 cache."""
SAMPLE = 65536
"""Largest count of values in a sample. At density 1 %, the count of selected numbers then has a standard deviation of
about 4 %.
"""
HITS = 1000
"""Count of sample values above the threshold that is enough: the count of selected numbers then has a standard
deviation of 3 %.
"""
SMALLEST = 16384
"""Smallest tensor that is sampled, as a count of numbers. For a smaller one, a sample of an eighth gives a poor
threshold.
"""
BLOCK = 1024
"""Approximate count of numbers in a block of the selector `block`."""
_TINY = torch.finfo(torch.float32).tiny

_Selected = tuple[Tensor, Tensor | None]
"""(positions, the numbers at these positions); the numbers are None if the selection does not yield them."""


def select(values: Tensor, k: int, how: Selector = "sampled", seed: int = 0) -> Tensor:
    """Select about k numbers to send; return their positions: [about k], int64, ascending, distinct.

    exact, block and random select k numbers; sampled, a count within `TOLERANCE` of k. Except with random, zeros and
    subnormal numbers are never selected, so the count is lower if fewer than k numbers remain.

    Args:
        values: [n], fp32, contiguous, finite.
        k: less than 1 selects none, n or more selects all.
        how: exact: the largest by magnitude. sampled: those above a threshold that is estimated from a sample (as in
            DGC, Lin et al. 2018, section 3.1), and corrected if its count is off. block: equally many from each of
            several equal blocks, the largest by magnitude. random: one uniformly drawn position in each of k equal
            blocks, regardless of the values.
        seed: seed of the sample and of random positions. With random, ranks with the same seed, n and k get the same
            positions; use another seed in each step.
    """
    return _choose(values, k, how, seed)[0]


def select_with_values(values: Tensor, k: int, how: Selector = "sampled", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions that `select` returns, and a copy of the numbers at these positions: [about k], fp32.

    `values`, `k`, `how` and `seed` mean the same as for `select`. On a GPU, `sampled` writes positions and numbers
    together, so the values need not be read again.
    """
    positions, numbers = _choose(values, k, how, seed)
    return positions, values.index_select(0, positions) if numbers is None else numbers


def seed_of(step: int, tensor: int) -> int:
    """Return a seed for `select`: different for each step and each tensor (by its index), the same on all ranks."""
    return (step * 65_537 + tensor) % 2**63


def _choose(values: Tensor, k: int, how: Selector, seed: int) -> _Selected:
    n = values.numel()
    if k < 1:
        return torch.empty(0, dtype=torch.int64, device=values.device), None
    if how == "random":
        return _stratified(n, min(k, n), seed).to(values.device), None
    if k >= n:
        return _at_least(values, values.new_full((), _TINY))
    match how:
        case "sampled" if n >= SMALLEST:
            return _sampled(values, k, seed)
        case "block":
            return _by_block(values, k), None
        case "exact" | "sampled":
            return _exact(values, k), None


def _exact(values: Tensor, k: int) -> Tensor:
    magnitudes, places = values.abs().topk(k, sorted=False)
    return places[magnitudes >= _TINY].sort().values


def _sampled(values: Tensor, k: int, seed: int) -> _Selected:
    n = values.numel()
    size = min(SAMPLE, n // 8, -(-HITS * n // k))
    # The sample is drawn at random: a stride that divides the width of a matrix would sample only a few of its columns.
    # It is drawn on the CPU, because a device's generator draws other positions. Pinned memory is copied without a
    # wait.
    drawn = torch.randint(n, (size,), generator=torch.Generator().manual_seed(seed), pin_memory=values.is_cuda)
    sample = values.index_select(0, drawn.to(values.device, non_blocking=True)).abs()
    # The second, lower threshold is used if the first selects too few; a surplus is then removed by exact selection.
    for share in (k / n, min(1.0, 1.5 * k / n + 8 / size)):
        rank = max(1, round(share * size))
        # The threshold stays on its device: reading it would make the host wait for the device once more.
        threshold = sample.topk(rank, sorted=False).values.min().clamp_min(_TINY)
        positions, numbers = _at_least(values, threshold)
        if len(positions) > k * (1 + TOLERANCE):
            return positions[_exact(values[positions] if numbers is None else numbers, k)], None
        if len(positions) >= k * (1 - TOLERANCE) or float(threshold) == _TINY:
            return positions, numbers
    return _exact(values, k), None


def _by_block(values: Tensor, k: int) -> Tensor:
    n = values.numel()
    per_block = max(1, round(BLOCK * k / n))
    size = -(-n * per_block // k)
    blocks = n // size
    whole, tail = values[: blocks * size].view(blocks, size), values[blocks * size :]
    magnitudes, places = whole.abs().topk(per_block, dim=1, sorted=False)
    places += torch.arange(blocks, device=values.device).unsqueeze(1) * size
    chosen = places[magnitudes >= _TINY].sort().values
    return torch.cat([chosen, _exact(tail, min(k - blocks * per_block, tail.numel())) + blocks * size])


def _stratified(n: int, k: int, seed: int) -> Tensor:
    starts = torch.arange(k + 1, dtype=torch.int64) * n // k
    widths = starts.diff()
    # Drawn on the CPU in fp64, because a device's generator draws other positions.
    drawn = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return starts[:-1] + (drawn * widths).long()


def _at_least(values: Tensor, threshold: Tensor) -> _Selected:
    """Return (the positions of the values whose magnitude reaches a threshold, these values). The second item is None
    on a CPU. NaN is never selected.
    """
    if values.device.type != "cpu":
        return threshold_select(values.device)(values, threshold)
    n = values.numel()
    magnitudes = torch.empty(min(n, CHUNK))
    passed = torch.empty(min(n, CHUNK), dtype=torch.bool)
    positions = []
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        torch.abs(values[start : start + size], out=magnitudes[:size])
        torch.ge(magnitudes[:size], threshold, out=passed[:size])
        # numpy's search is twice as fast as torch's on one thread.
        places = np.flatnonzero(passed[:size].numpy())
        places += start
        positions.append(places)
    return torch.from_numpy(np.concatenate(positions)) if positions else torch.empty(0, dtype=torch.int64), None
