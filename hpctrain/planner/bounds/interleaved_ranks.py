"""What pipeline ranks compute while the pipeline fills and drains, with interleaved 1F1B and two stages on each rank.

The times hold for any split of a rank's blocks over its two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray, IntArray
from hpctrain.planner.bounds.unit_counts import UnitClass


class RoundCounts(NamedTuple):
    """Numbers of actions of a rank that holds two stages: forwards before its first backward, by stage, and backwards
    of the first stage after the last backward of the second one. Each field is an array whose last axis is the pipeline
    rank; the axes before it are those of `round_counts`' argument `micro_batches`.
    """

    before: FloatArray
    """Forwards of the rank's first stage before its first backward."""
    between: FloatArray
    """Forwards of the rank's second stage before its first backward."""
    after: FloatArray
    """Backwards of the rank's first stage after the last backward of its second stage."""


def round_counts(pp: int, micro_batches: IntArray) -> RoundCounts:
    """Return how many actions each pipeline rank runs at the beginning and at the end of a step (the fields of
    RoundCounts), by the rounds of micro-batches of interleaved 1F1B in `hpctrain.schedule.generate`.

    Args:
        micro_batches: number of micro-batches, at least 1, as [..., pipeline rank] or [..., 1].
    """
    rounds = np.maximum(1, micro_batches // pp)
    longest = -(-micro_batches // rounds)
    # The warm-up forwards, and the forward that is paired with the first backward.
    forwards = np.minimum(longest + 2 * (pp - 1 - np.arange(pp)) + 1, 2 * micro_batches)
    before = np.minimum(forwards, longest) + np.maximum(forwards - 2 * longest, 0)
    after = np.broadcast_to(micro_batches // rounds, before.shape)
    return RoundCounts(before.astype(float), (forwards - before).astype(float), after.astype(float))


class TwoStageRanks:
    """Seconds of the two stages of each pipeline rank; they depend on how many of the rank's blocks are in its first
    stage. In this class, a rank is a pipeline rank.

    All arrays have the shape of `cuts`.

    Args:
        classes: the classes of tensor-parallel groups.
        mixes: [..., pipeline rank] -> index in `classes` of the class of the rank's tensor-parallel group.
        cuts: [..., pipeline rank] -> number of blocks of the rank.
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
        """Return the seconds of each rank's actions that may overlap the pass of one micro-batch through all ranks
        and back.

        Returns:
            The seconds if the rank's first stage holds no block, and the seconds that each block in the first stage
            adds; both have the shape of the class's argument `cuts`, [..., rank].
        """
        none = counts.before * self.front_f + counts.between * self.back_f + counts.after * self.front_b + self.back_b
        return none, (counts.before - counts.between) * self.block_f + (counts.after - 1) * self.block_b


def cap_by_passes(
    classes: Sequence[UnitClass], caps: FloatArray, both: FloatArray, remaining_s: FloatArray
) -> FloatArray:
    """Return `caps`, lowered to the most micro-batches that a rank can compute within the time limit, if one
    micro-batch has to pass through the whole pipeline, too.

    Args:
        classes: the classes of tensor-parallel groups.
        caps: [rank, class, blocks] -> most micro-batches; the result has the same shape.
        both: [rank, class, blocks] -> seconds of a micro-batch on the rank, forward and backward.
        remaining_s: [rank, class, blocks] -> seconds that the time limit leaves after one micro-batch's pass through
            the pipeline and back, the last all-reduce and the update.
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
