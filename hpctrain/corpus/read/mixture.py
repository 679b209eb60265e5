"""Mixes several corpora (sources) in given shares: the source of sample number i of a run is a function of i alone.

The order of sources repeats with a period, in which each source has a fixed number of samples. Within a period, a
source is left out while it is ahead of its share; of the others, the one whose next sample is due first is chosen (R.
Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). So among the first n samples of a run, for
every n, each source has its share, within less than one sample. Each source has its own epochs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.corpus.read.tokens import Corpus

PERIOD = 1 << 14
"""Most samples in a period of the order of sources. Shares that would need a longer period are rounded to multiples of
1 / PERIOD."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class SourceOrder:
    """The order in which the corpora of a mixture (the sources) give samples. It repeats after a period."""

    source: Indices
    """Index of the source at each position of the period, [period]."""
    before: Indices
    """Number of samples of each source before each position of the period, [period + 1, sources]. The last row is for
    the whole period."""


@dataclass(frozen=True)
class Mixture:
    """Several corpora, and the order in which samples are drawn from them. A run whose data have weights reads a
    Mixture instead of a Corpus."""

    names: tuple[str, ...]
    """Names of the corpora in metrics, in the order of `corpora`."""
    corpora: tuple[Corpus, ...]
    order: SourceOrder

    @classmethod
    def of(cls, names: Sequence[str], corpora: Sequence[Corpus], weights: Sequence[float]) -> Mixture:
        """Return the mixture of the corpora in proportion to `weights`, one for each corpus. The weights need not add
        up to 1."""
        return cls(tuple(names), tuple(corpora), order_of(counts_of(weights)))

    def rows(self, seed: int, start: int, count: int) -> Indices:
        """Return the windows of samples [start, start + count) of the endless stream: [count, seq_len + 1]. The first
        seq_len columns are the input, the last seq_len the targets, as in `Corpus.rows`."""
        sources, numbers = locate_samples(self.order, np.arange(start, start + count, dtype=np.int64))
        rows = np.empty((count, self.corpora[0].seq_len + 1), dtype=np.int64)
        for number, corpus in enumerate(self.corpora):
            here = np.flatnonzero(sources == number)
            if here.size:
                # The seed differs by folder, so that folders of equal size have different permutations.
                rows[here] = corpus.pick(seed + number, numbers[here])
        return rows

    def taken(self, samples: int) -> dict[str, int]:
        """Return name of the corpus -> number of its samples among the first `samples` samples of the run."""
        period = len(self.order.source)
        counts = self.order.before[-1] * (samples // period) + self.order.before[samples % period]
        return dict(zip(self.names, counts.tolist(), strict=True))


def open_training(
    folders: Sequence[str], weights: Sequence[float] | None, length: int, places: Sequence[str] | None = None
) -> Corpus | Mixture:
    """Open the training part of the corpus folders. Without weights, all their windows are shuffled together; with
    weights, they are mixed in proportion to the weights.

    Args:
        length: tokens in a window, without the one after it.
        places: for each folder, the folder to read it from, such as a copy on this node; None: the folders themselves.

    Raises:
        InputError: a folder is missing, tokenizers differ, or there are too few tokens for one window. With weights,
            every folder needs a window.
        FileError: an index is damaged, or a shard is missing or truncated.
    """
    places = places or folders
    if weights is None:
        return Corpus.open(places, "train", length)
    corpora = [Corpus.open([path], "train", length, f"data.train[{number}]") for number, path in enumerate(places)]
    return Mixture.of(short_names(folders), corpora, weights)


def short_names(folders: Sequence[str]) -> list[str]:
    """Return the last part of each folder's path; if two of them are equal, the whole paths."""
    names = [Path(folder).name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def locate_samples(order: SourceOrder, samples: Indices) -> tuple[Indices, Indices]:
    """Return two arrays of shape [n]: the index of each sample's source, and the sample's number among the samples of
    that source.

    Args:
        samples: the samples' numbers in the run, [n].
    """
    period = len(order.source)
    turn, at = samples // period, samples % period
    source = order.source[at]
    return source, turn * order.before[-1][source] + order.before[at, source]


def counts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of samples of each source in a period of the order of sources. The numbers are exactly
    proportional to the weights if a period of at most PERIOD samples allows that. Else they are rounded, at least 1
    each."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(part.denominator for part in exact))
    whole = [int(part * scale) for part in exact]
    common = math.gcd(*whole)
    if sum(whole) // common <= PERIOD:
        return tuple(number // common for number in whole)
    room, total = PERIOD - len(whole), sum(whole)
    counts = [1 + room * number // total for number in whole]
    by_remainder = sorted(range(len(whole)), key=lambda i: (-(room * whole[i] % total), i))
    for index in by_remainder[: PERIOD - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


@functools.cache
def order_of(counts: tuple[int, ...]) -> SourceOrder:
    """Return the order of sources whose period has `counts[i]` samples of source i."""
    period, share = sum(counts), np.array(counts, dtype=np.int64)
    done = np.zeros(len(counts), dtype=np.int64)
    before = np.zeros((period + 1, len(counts)), dtype=np.int64)
    source = np.empty(period, dtype=np.int64)
    free, offset = (len(counts) - 1) * 2, 2 * len(counts) - 3
    for at in range(period):
        source[at] = 0
        if len(counts) > 1:
            # Sample `done` of a source may come once its share is ahead by 1/(2k-2), and is due when it would be behind
            # by 1 - 1/(2k-2); everything is multiplied by that denominator to stay with integers.
            ready = free * share * (at + 1) >= free * done * period + period
            due = -(-(free * done + offset) * period // (free * share))
            source[at] = np.argmin(np.where(ready, due, np.iinfo(np.int64).max))
        done[source[at]] += 1
        before[at + 1] = done
    return SourceOrder(source, before)
