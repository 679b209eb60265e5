"""Turns windows of tokens into model inputs and targets: a pure function of (seed, sample number, tokens).

Every random choice is a hash of the seed, the sample's number in the run, and the position. So a sample does not depend
on the rank that makes it, nor on the batch. A window that comes again in a later epoch has another sample number, and
so other random choices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.corpus.read.sampler import splitmix64
from hpctrain.corpus.read.special_tokens import SpecialTokens
from hpctrain.records.model.span_corruption import Lengths
from hpctrain.records.run.objective import AnyObjective, Masked, NextToken, SpanCorruption, lengths

NO_TARGET = -100
"""Target of a position that the loss leaves out, as in torch."""

Tokens = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

_CHOICE, _KIND, _TOKEN, _NOISE, _UNCORRUPTED = range(1, 6)
"""Numbers of the independent random streams."""


class Examples(NamedTuple):
    """Training samples as model inputs and targets; `records.model.span_corruption.Lengths` has the lengths."""

    inputs: Tokens
    """Input tokens, [n, inputs]."""
    targets: Tokens
    """Target tokens, [n, outputs]; `NO_TARGET` where the loss leaves out the position."""
    decoder_tokens: Tokens | None = None
    """Input tokens of the decoder, [n, outputs]; only for encoder-decoder models."""


def examples(
    objective: AnyObjective, special: SpecialTokens, seq_len: int, seed: int, samples: Tokens, rows: Tokens
) -> Examples:
    """Return the training examples of the given samples.

    Args:
        seq_len: data.seq_len.
        seed: the run's seed; a fixed one gives the same examples in each validation.
        samples: the samples' numbers in the run, [n].
        rows: the samples' windows of tokens, [n, raw + 1] (the last column is the token after the window).
    """
    match objective:
        case NextToken():
            return Examples(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))
        case Masked():
            chosen = lengths(objective, seq_len).targets
            return _masked(objective, special, chosen, seed, samples, np.ascontiguousarray(rows[:, :-1]))
        case SpanCorruption():
            return _corrupted(special, lengths(objective, seq_len), seed, samples, rows[:, :-1])


def _masked(
    objective: Masked, special: SpecialTokens, chosen: int, seed: int, samples: Tokens, rows: Tokens
) -> Examples:
    count = rows.shape[1]
    # The smallest hashes of a sequence: the same number of positions in each, and every set of them equally likely.
    where = np.argpartition(_hashes(seed, _CHOICE, samples, count), chosen - 1, axis=1)[:, :chosen]
    line = np.arange(len(rows))[:, None]
    assert special.mask is not None, "an objective comes with its own special tokens"
    originals = rows[line, where]
    kind = _hashes(seed, _KIND, samples, count)[line, where] / 2.0**64
    other = _hashes(seed, _TOKEN, samples, count)[line, where] % np.uint64(special.data_vocabulary)
    shown = np.where(kind < objective.mask_fraction + objective.random_fraction, other.astype(np.int64), originals)
    inputs, targets = rows.copy(), np.full_like(rows, NO_TARGET)
    inputs[line, where] = np.where(kind < objective.mask_fraction, special.mask, shown)
    targets[line, where] = originals
    return Examples(inputs, targets)


def _corrupted(special: SpecialTokens, sizes: Lengths, seed: int, samples: Tokens, rows: Tokens) -> Examples:
    n, raw = rows.shape
    noise = sizes.outputs - 1 - sizes.spans
    uncorrupted = _segments(_hashes(seed, _UNCORRUPTED, samples, raw - noise - 1), sizes.spans, raw - noise)
    taken = _segments(_hashes(seed, _NOISE, samples, noise - 1), sizes.spans, noise)
    # A sequence begins with a kept segment; after that, taken and kept segments alternate.
    bounds = np.stack([uncorrupted, taken], axis=2).reshape(n, 2 * sizes.spans).cumsum(axis=1)
    begins = np.zeros((n, raw), dtype=np.int64)
    np.put_along_axis(begins, bounds[:, :-1], 1, axis=1)
    stretch = begins.cumsum(axis=1)  # number of the segment that a position is in; the odd ones are taken out
    noisy, first = stretch % 2 == 1, (begins == 1) & (stretch % 2 == 1)
    sentinel = np.array(special.sentinels, dtype=np.int64)[stretch // 2]
    end = np.full((n, 1), special.end_of_text, dtype=np.int64)
    inputs = np.where(first, sentinel, rows)[~noisy | first].reshape(n, sizes.inputs - 1)
    both = np.stack([sentinel, rows], axis=2)
    targets = both[np.stack([first, noisy], axis=2)].reshape(n, sizes.outputs - 1)
    targets = np.concatenate([targets, end], axis=1)
    start = np.full((n, 1), special.start, dtype=np.int64)
    decoder_tokens = np.concatenate([start, targets[:, :-1]], axis=1)
    return Examples(np.concatenate([inputs, end], axis=1), targets, decoder_tokens)


def _segments(hashes: UInt64, parts: int, total: int) -> Tokens:
    """Return the lengths of `parts` segments, each at least 1, that sum to `total`; every partition is equally likely:
    [n, parts].

    Args:
        hashes: one for each boundary between two items, [n, total - 1].
    """
    cuts = np.zeros((len(hashes), parts + 1), dtype=np.int64)
    cuts[:, -1] = total
    if parts > 1:
        places = np.argpartition(hashes, parts - 2, axis=1)[:, : parts - 1]
        cuts[:, 1:-1] = np.sort(places, axis=1) + 1
    return np.diff(cuts, axis=1)


def _hashes(seed: int, stream: int, samples: Tokens, count: int) -> UInt64:
    """Return the random numbers of a stream for each sample and position, [n, count]."""
    base = splitmix64(splitmix64(np.full(samples.shape, seed % 2**64, dtype=np.uint64)) ^ samples.astype(np.uint64))
    keys = splitmix64(base + np.uint64(stream))
    positions = np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return splitmix64(keys[:, None] + positions[None, :])
