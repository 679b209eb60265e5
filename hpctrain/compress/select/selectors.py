"""Which numbers of a gradient are sent: the largest ones, found in several ways, or agreed random ones.

`sampled` estimates a threshold from a random sample, because an exact `torch.topk` over a gradient takes about ten
times as long (docs/results/compression.md). k is therefore not exact and differs between ranks: each exchange sends
sizes first.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpctrain.compress.select import device_select

Selector = Literal["exact", "sampled", "block", "random"]

TOLERANCE = 0.1
"""By how much the count of `sampled` may differ from what was asked, as a share of it."""
CHUNK = 65536
"""Numbers looked at together on a CPU: what is written about them stays in its second cache."""
SAMPLE = 65536
"""Numbers in a sample, at most; at density 1 % the count then has a standard deviation of 4 %."""
HITS = 1000
"""Numbers of a sample above its threshold that are enough: the count then has a standard deviation of 3 %."""
SMALLEST = 16384
"""A shorter tensor is not sampled: the sample would be most of it."""
BLOCK = 1024
"""Numbers in a block of `block`, about."""
_TINY = torch.finfo(torch.float32).tiny

_Selected = tuple[Tensor, Tensor | None]
"""Positions, and the numbers there where they came along for nothing."""


def select(values: Tensor, k: int, how: Selector = "sampled", seed: int = 0) -> Tensor:
    """Choose about k numbers to send.

    exact, block, random: k of them. sampled: within `TOLERANCE` of k. Except for random, a zero is never chosen, so
    that there are fewer where fewer differ from zero; a tensor of zeros gives none.

    Args:
        values: [n], fp32, contiguous, finite.
        k: how many; less than 1 gives none, n or more gives all.
        how: exact: the largest by magnitude. sampled: those above a threshold that is estimated from a sample (as in
            DGC, Lin et al. 2018, section 3.1), and corrected where its count is off. block: the largest of each of
            equal stretches. random: one place, drawn evenly, in each of k equal stretches, whatever the values are.
        seed: of the sample and of the random places. With random, ranks that give the same seed, n and k get the same
            places; give another one in each step.

    Returns:
        [about k], int64, ascending, without repetition.
    """
    return _choose(values, k, how, seed)[0]


def select_with_values(values: Tensor, k: int, how: Selector = "sampled", seed: int = 0) -> tuple[Tensor, Tensor]:
    """What `select` gives, and the numbers there: [about k], fp32, memory of their own.

    On a GPU `sampled` writes both in one pass over the values.
    """
    positions, numbers = _choose(values, k, how, seed)
    return positions, values.index_select(0, positions) if numbers is None else numbers


def seed_of(seed: int, step: int, layer: int) -> int:
    """A seed for `select`: another one for every step and tensor, the same on all ranks."""
    return ((seed * 1_000_003 + step) * 65_537 + layer) % 2**63


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
    return _exact(values, k), None


def _exact(values: Tensor, k: int) -> Tensor:
    magnitudes, places = values.abs().topk(k, sorted=False)
    return places[magnitudes >= _TINY].sort().values


def _sampled(values: Tensor, k: int, seed: int) -> _Selected:
    n = values.numel()
    size = min(SAMPLE, n // 8, -(-HITS * n // k))
    # Drawn, not strided: a stride that divides the width of a matrix would look at a few of its columns only.
    # On the CPU: a device's own generator would draw other places. From pinned memory they are copied without a wait.
    drawn = torch.randint(n, (size,), generator=torch.Generator().manual_seed(seed), pin_memory=values.is_cuda)
    sample = values.index_select(0, drawn.to(values.device, non_blocking=True)).abs()
    # The second threshold is for a first one that lets too few through; what is then too much is cut off exactly.
    for share in (k / n, min(1.0, 1.5 * k / n + 8 / size)):
        rank = max(1, round(share * size))
        # It stays on its device: reading it would wait for the device once more than the count does.
        threshold = sample.topk(rank, sorted=False).values.min().clamp_min(_TINY)
        found, numbers = _at_least(values, threshold)
        if len(found) > k * (1 + TOLERANCE):
            return found[_exact(values[found] if numbers is None else numbers, k)], None
        if len(found) >= k * (1 - TOLERANCE) or float(threshold) == _TINY:
            return found, numbers
    return _exact(values, k), None


def _by_block(values: Tensor, k: int) -> Tensor:
    n = values.numel()
    each = max(1, round(BLOCK * k / n))
    size = -(-n * each // k)
    blocks = n // size
    whole, rest = values[: blocks * size].view(blocks, size), values[blocks * size :]
    magnitudes, places = whole.abs().topk(each, dim=1, sorted=False)
    places += torch.arange(blocks, device=values.device).unsqueeze(1) * size
    chosen = places[magnitudes >= _TINY].sort().values
    return torch.cat([chosen, _exact(rest, min(k - blocks * each, rest.numel())) + blocks * size])


def _stratified(n: int, k: int, seed: int) -> Tensor:
    starts = torch.arange(k + 1, dtype=torch.int64) * n // k
    widths = starts.diff()
    # On the CPU, in fp64: a device's own generator would draw other places.
    drawn = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return starts[:-1] + (drawn * widths).long()


def _at_least(values: Tensor, threshold: Tensor) -> _Selected:
    """Where the magnitude reaches a threshold; never where a value is not a number."""
    if values.device.type != "cpu":
        return device_select.at_least(values, threshold)
    n = values.numel()
    magnitudes = torch.empty(min(n, CHUNK))
    passed = torch.empty(min(n, CHUNK), dtype=torch.bool)
    found = []
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        torch.abs(values[start : start + size], out=magnitudes[:size])
        torch.ge(magnitudes[:size], threshold, out=passed[:size])
        # numpy's search is twice as fast as torch's on one thread.
        places = np.flatnonzero(passed[:size].numpy())
        places += start
        found.append(places)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64), None
