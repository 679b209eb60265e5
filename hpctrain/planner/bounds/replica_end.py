"""Lower bound of a replica's end, by its cut, the classes of its units and its micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.interleaved import TwoStageRanks, bound_weights, round_counts
from hpctrain.planner.bounds.pipeline_passes import warmup_forwards
from hpctrain.planner.bounds.rank_times import RankTimes
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class ReplicaFinish:
    """Bounds for many replicas at once.

    Args:
        cuts: [replica, rank] -> blocks.
        mixes: [replica, rank] -> class of the unit.
    """

    def __init__(self, ranks: RankTimes, cuts: IntArray, mixes: IntArray) -> None:
        self.ranks, self.cuts, self.mixes = ranks, cuts, mixes
        times, pp = ranks.times, ranks.pp
        rank = np.arange(pp)
        self.forward, self.backward, self.both, self.sums = (
            each[rank, mixes, cuts] for each in (times.forward, times.backward, times.both, times.sums)
        )
        self.update = times.update[rank, mixes, cuts].max(axis=1)
        passes = ranks.passes
        # [rank] -> seconds of the messages of a pass through the ranks up to this one, and from this one on
        self.hops_to = np.array([passes.hops_s(each + 1) for each in range(pp)])
        self.hops_from = self.hops_to[::-1]
        self.hops = passes.one_way_s

    def end_s(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """The least seconds until replicas have done their micro-batches, all-reduce and update.

        Args:
            at: indices of replicas.
            numbers: micro-batches of each.
        """
        schedule_spec = self.ranks.schedule_spec
        found = self._end_by_own_passes(at, numbers)
        if schedule_spec.virtual_stages == 1 and schedule_spec.name not in SPLIT_BACKWARD_SCHEDULES:
            found = np.maximum(found, self._there_and_back(at, numbers))
        elif schedule_spec.name == "interleaved_1f1b" and self.ranks.equal_blocks:
            found = np.maximum(found, self._interleaved(at, numbers))
        return np.asarray(found + self.update[at])

    def _end_by_own_passes(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds from the forward pass through all stages before each rank's first backward."""
        many, early = numbers[:, None], warmup_forwards(self.ranks.schedule_spec, self.ranks.pp)
        forward = self.forward[at]
        way = forward.sum(axis=1, keepdims=True) + self.hops
        after = many * self.both[at] - np.minimum(many, early) * forward + self.sums[at]
        return np.asarray((way + after).max(axis=1))

    def _there_and_back(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds with one stage a rank and whole backwards, the largest of three.

        They are: what comes before a rank's first forward and after its last backward; a whole pass and all else that
        the rank does; with 1f1b, round trips from each rank to the last one.
        """
        pp, many = self.ranks.pp, numbers[:, None]
        forward, backward, both, sums = (each[at] for each in (self.forward, self.backward, self.both, self.sums))
        way_in = np.cumsum(forward, axis=1) - forward + self.hops_to
        way_out = np.cumsum(backward, axis=1) - backward + self.hops_to
        busy = many * both
        early = np.minimum(many, warmup_forwards(self.ranks.schedule_spec, pp))
        one_pass = both.sum(axis=1, keepdims=True) + 2 * self.hops
        to_first = np.maximum(way_in + busy + way_out, one_pass + busy - early * forward - backward)
        if self.ranks.schedule_spec.name == "1f1b":
            trip = np.cumsum(both[:, ::-1], axis=1)[:, ::-1] + 2 * self.hops_from
            to_first = np.maximum(to_first, way_in + way_out + np.ceil(many / (pp - np.arange(pp))) * trip)
        own = (way_in + busy + sums).max(axis=1)
        return np.asarray(np.maximum(own, to_first.max(axis=1) + sums[:, 0]))

    def _interleaved(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds with two stages a rank, for any split of the rank's blocks over them.

        The weighted bounds of `bound_weights` are linear in the blocks of the first stages, so the least sum is at an
        end of their range.
        """
        pp, many, both = self.ranks.pp, numbers[:, None], self.both[at]
        halves = TwoStageRanks(self.ranks.classes, self.mixes[at], self.cuts[at])
        block, front = halves.block_f + halves.block_b, halves.front_f + halves.front_b
        none, more = halves.beside_s(round_counts(pp, many))
        ahead = np.cumsum(front, axis=1) - front + 2 * self.hops_to
        beside = both.sum(axis=1, keepdims=True) + 2 * self.hops - none
        found = np.zeros(len(at))
        every, which = np.unique(numbers, return_inverse=True)
        for weights in np.array([bound_weights(pp, int(each)) for each in every])[which].swapaxes(0, 1):
            first, second = weights[:, 0], weights[:, 1]
            later = first.sum(axis=1, keepdims=True) - np.cumsum(first, axis=1)
            slope = later * block - second * more
            added = (first + second) * many * both + first * ahead + second * beside
            added = added + np.minimum(slope * halves.least, slope * halves.most)
            found = np.maximum(found, added.sum(axis=1))
        return np.asarray(found + self.sums[at][:, 0])
