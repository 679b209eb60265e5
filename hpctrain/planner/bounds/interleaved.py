"""Bounds for interleaved 1F1B with two stages a rank, for any split of a rank's blocks over its stages.

They count what ranks compute while the pipeline fills and drains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray, IntArray
from hpctrain.planner.bounds.unit_counts import UnitClass

REFERENCE_SPLIT = (1 / 3, 2 / 3)
"""Split of a pass into (forward, backward) that the weights of the bounds are tuned for; the bounds hold with any
split.
"""
MIN_OVERLAP = 1e-3


class RoundCounts(NamedTuple):
    """Numbers of actions before a rank's first backward, and after the last backward of its second stage; [..., rank]
    each.
    """

    before: FloatArray
    """Forwards of the rank's first stage before its first backward."""
    between: FloatArray
    """Forwards of the rank's second stage before its first backward."""
    after: FloatArray
    """Backwards of the rank's first stage after the last backward of its second stage."""


def round_counts(pp: int, micro_batches: IntArray) -> RoundCounts:
    """Return the numbers of actions that the rounds of `hpctrain.schedule.generate` lead to.

    Args:
        micro_batches: [..., 1 or rank], each at least 1.
    """
    rounds = np.maximum(1, micro_batches // pp)
    longest = -(-micro_batches // rounds)
    # The warm-up forwards, and the forward that is paired with the first backward.
    forwards = np.minimum(longest + 2 * (pp - 1 - np.arange(pp)) + 1, 2 * micro_batches)
    before = np.minimum(forwards, longest) + np.maximum(forwards - 2 * longest, 0)
    after = np.broadcast_to(micro_batches // rounds, before.shape)
    return RoundCounts(before.astype(float), (forwards - before).astype(float), after.astype(float))


class TwoStageRanks:
    """Seconds of the two stages of each rank, by the number of blocks in the first one.

    Arrays are [replica or class, blocks, rank].

    Args:
        mixes: [..., rank] -> class of a tensor-parallel group.
        cuts: [..., rank] -> blocks of a rank.
    """

    def __init__(self, classes: Sequence[UnitClass], mixes: IntArray, cuts: IntArray) -> None:
        pp = cuts.shape[-1]
        first, last = np.arange(pp) == 0, np.arange(pp) == pp - 1
        action = np.array([unit_class.action for unit_class in classes])[mixes]
        # [forward or backward, ..., rank]
        block, embedding, head = (
            np.moveaxis(np.array([getattr(unit_class, part) for unit_class in classes])[mixes], -1, 0)
            for part in ("block", "embedding", "head")
        )
        self.block_f, self.block_b = block
        self.front_f, self.front_b = action + first * embedding
        """Seconds of the first stage, forward and backward, without its blocks."""
        self.back_f, self.back_b = action + last * head + cuts * block
        """Seconds of the second stage, forward and backward, if it holds all blocks."""
        self.least = np.broadcast_to(np.where(first, 0, 1), cuts.shape)
        """The fewest blocks of the first stage: 0 on the first rank, whose first stage holds the embedding, else 1."""
        self.most = np.maximum(cuts - np.where(last, 0, 1), self.least)

    def overlap_s(self, counts: RoundCounts) -> tuple[FloatArray, FloatArray]:
        """Seconds of a rank that may overlap a whole pass: with no block in its first stage, and added by each such
        block.
        """
        none = counts.before * self.front_f + counts.between * self.back_f + counts.after * self.front_b + self.back_b
        return none, (counts.before - counts.between) * self.block_f + (counts.after - 1) * self.block_b


def cap_by_passes(
    classes: Sequence[UnitClass], caps: FloatArray, both: FloatArray, remaining_s: FloatArray
) -> FloatArray:
    """Lower `caps` to the micro-batches that a rank has time for beside a whole pass through the pipeline.

    Args:
        caps: [rank, class, blocks] -> micro-batches; the result has the same shape.
        both: [rank, class, blocks] -> seconds of a micro-batch, forward and backward.
        remaining_s: [rank, class, blocks] -> seconds that a pass leaves to a rank.
    """
    pp, number, blocks = caps.shape
    mixes, cuts, _ = np.meshgrid(np.arange(number), np.arange(blocks), np.arange(pp), indexing="ij")
    halves = TwoStageRanks(classes, mixes, cuts)
    caps, both, remaining_s = (np.moveaxis(array, 0, -1).copy() for array in (caps, both, remaining_s))
    # A round has fewer than twice as many micro-batches as there are ranks.
    most = 2 * pp * (halves.front_f + halves.back_f + halves.front_b + halves.back_b)
    caps = np.minimum(caps, np.floor(np.maximum(remaining_s + most, 0) / both))
    while True:
        none, added = halves.overlap_s(round_counts(pp, np.maximum(caps, 1).astype(np.int64)))
        overlap = none + np.maximum(added * halves.least, added * halves.most)
        late = (caps > 0) & (caps * both - overlap > remaining_s)
        if not late.any():
            return np.moveaxis(caps, -1, 0)
        caps[late] -= 1


@lru_cache(maxsize=1024)
def bound_weights(pp: int, micro_batches: int, end_ranks: int) -> FloatArray:
    """[set, kind, rank] -> weights of the bounds on a replica's time; the weights of a set add up to one.

    There are two kinds of bound. In the first, rank r starts after the first stages of the ranks before it, and ends
    before their last backwards. The second is a whole pass, plus all that rank r does between its first backward and
    the last backward of its second stage. Blocks in first stages lengthen the first kind and shorten the second. In
    each set a rank near the end has a bound of the first kind, and the ranks before it have one of the second. If
    forward and backward take the shares `REFERENCE_SPLIT`, the weighted sum does not depend on where the blocks are.

    Args:
        end_ranks: number of ranks at each end of the pipeline at which a set may begin or end.
    """
    before, between, after = round_counts(pp, np.array([micro_batches]))
    forward, backward = REFERENCE_SPLIT
    overlap = np.maximum((before - between) * forward + (after - 1) * backward, MIN_OVERLAP)
    sets = []
    for last, first in itertools.product(range(pp - 1, max(0, pp - 1 - end_ranks), -1), range(end_ranks)):
        if first < last:
            weights = np.zeros((2, pp))
            weights[0, last] = 1
            weights[1, first:last] = 1 / overlap[first:last]
            sets.append(weights / weights.sum())
    return np.array(sets)
