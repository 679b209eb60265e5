"""Finds the window of the corpus that is sample number i of a run: a pure function of (seed, i), whatever the plan.

Each epoch is a permutation of all windows that is computed, never stored: a Feistel network over the smallest
power-of-four domain that holds them, with cycle walking back into the range. Source: J. Black, P. Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002, sections 3 (cycle walking) and 4 (Feistel). It need not resist an
adversary, so the round function is the mixer of SplitMix64 (Steele, Lea, Flood 2014) and not a cipher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

ROUNDS = 6
"""Rounds of the Feistel network. Four make it indistinguishable from a random permutation (Luby and Rackoff 1988); two
more are added because the halves have few bits with a small corpus."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample(seed: int, index: NDArray[np.int64], windows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (epoch, window) of each global sample index.

    Args:
        seed: the run's seed.
        index: global sample numbers, 0 is the first of the run; shape [n].
        windows: windows in the corpus, at least 1.

    Returns:
        Two int64 arrays of shape [n]. Over any whole epoch each window in [0, windows) comes exactly once.
    """
    if windows < 1:
        raise ValueError(f"windows: found {windows}, at least 1 is needed")
    epoch = index // windows
    return epoch, permuted(seed, epoch, index % windows, windows)


def permuted(seed: int, epoch: NDArray[np.int64], position: NDArray[np.int64], windows: int) -> NDArray[np.int64]:
    """Return the window at each position of its epoch's permutation; all arrays have shape [n]."""
    # Equal halves need a power of four, so at most three quarters of the domain lie outside the range.
    half_bits = max(1, ((windows - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    value = _feistel(position.astype(np.uint64), keys, half_bits)
    outside = np.flatnonzero(value >= windows)
    while outside.size:
        # The network permutes its domain, so walking on from a point in the range must return to the range.
        value[outside] = _feistel(value[outside], keys[:, outside], half_bits)
        outside = outside[value[outside] >= windows]
    return value.astype(np.int64)


def _feistel(value: UInt64, keys: UInt64, half_bits: int) -> UInt64:
    """Return each value after one pass through the balanced Feistel network over 2·half_bits bits; keys [ROUNDS, n]."""
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> np.uint64(half_bits), value & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << np.uint64(half_bits)) | right


def _round_keys(seed: int, epoch: NDArray[np.int64]) -> UInt64:
    """Return a key for each round and element, [ROUNDS, n]."""
    base = splitmix64(splitmix64(np.full(epoch.shape, seed % 2**64, dtype=np.uint64)) ^ epoch.astype(np.uint64))
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return splitmix64(base[None, :] + rounds * _GOLDEN)


def splitmix64(value: UInt64) -> UInt64:
    """Return a hash of each number: SplitMix64's next state and finaliser, in uint64 arithmetic that wraps around."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
