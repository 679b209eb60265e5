"""Lower bound of the time at which a replica ends, from its cut, its classes of tensor-parallel groups and its
micro-batches.
"""

from __future__ import annotations

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray, IntArray
from hpctrain.planner.bounds.interleaved import TwoStageRanks, bound_weights, round_counts
from hpctrain.planner.bounds.pipeline_passes import warmup_forwards
from hpctrain.planner.bounds.rank_times import RankTimes


class ReplicaFinish:
    """Bounds on the end of many replicas at once.

    Args:
        cuts: [replica, rank] -> blocks.
        mixes: [replica, rank] -> class of the tensor-parallel group.
    """

    def __init__(self, ranks: RankTimes, cuts: IntArray, mixes: IntArray) -> None:
        self.ranks, self.cuts, self.mixes = ranks, cuts, mixes
        rank = np.arange(ranks.pp)
        self.forward, self.backward, self.both, self.sums, update = (
            seconds[rank, mixes, cuts] for seconds in ranks.times
        )
        self.update = update.max(axis=1)
        # [rank] -> seconds of the messages of a pass through the ranks up to this one, and from this rank to the last
        # one
        self.hops_to = np.array([ranks.passes.hops_s(number) for number in range(1, ranks.pp + 1)])
        self.hops_from = self.hops_to[::-1]
        self.hops = ranks.passes.one_way_s
        self.early = warmup_forwards(ranks.option)

    def end_s(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """The least seconds until replicas have done their micro-batches, all-reduce and update.

        Args:
            at: indices of the replicas.
            numbers: number of micro-batches of each replica.
        """
        option, work = self.ranks.option, self.ranks.cost.work
        end_s = self._after_a_pass(at, numbers)
        if option.virtual_stages == 1 and not option.splits_backward:
            end_s = np.maximum(end_s, self._there_and_back(at, numbers))
        elif option.schedule_spec.name == "interleaved_1f1b" and work.least_blocks == work.spec.layers:
            # All blocks have one size.
            end_s = np.maximum(end_s, self._interleaved(at, numbers))
        return np.asarray(end_s + self.update[at])

    def _after_a_pass(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds that counts the forward pass through all stages before each rank's first backward."""
        many, forward = numbers[:, None], self.forward[at]
        first_pass = forward.sum(axis=1, keepdims=True) + self.hops
        after = many * self.both[at] - np.minimum(many, self.early) * forward + self.sums[at]
        return np.asarray((first_pass + after).max(axis=1))

    def _there_and_back(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds for schedules with one stage a rank and whole backwards: the largest of three bounds.

        The first counts what comes before a rank's first forward and after its last backward. The second counts a whole
        pass and all else that the rank does. The third, for 1f1b only, counts round trips from each rank to the last
        one.
        """
        pp, many = self.ranks.pp, numbers[:, None]
        forward, backward, both, sums = (array[at] for array in (self.forward, self.backward, self.both, self.sums))
        before = np.cumsum(forward, axis=1) - forward + self.hops_to
        after = np.cumsum(backward, axis=1) - backward + self.hops_to
        busy = many * both
        early = np.minimum(many, self.early)
        one_pass = both.sum(axis=1, keepdims=True) + 2 * self.hops
        to_first = np.maximum(before + busy + after, one_pass + busy - early * forward - backward)
        if self.ranks.option.schedule_spec.name == "1f1b":
            trip = np.cumsum(both[:, ::-1], axis=1)[:, ::-1] + 2 * self.hops_from
            to_first = np.maximum(to_first, before + after + np.ceil(many / (pp - np.arange(pp))) * trip)
        last_sum = (before + busy + sums).max(axis=1)
        return np.asarray(np.maximum(last_sum, to_first.max(axis=1) + sums[:, 0]))

    def _interleaved(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Bound in seconds with two stages a rank, for any split of the rank's blocks over them.

        The weighted bounds of `bound_weights` are linear in the blocks of the first stages, so the least sum is at an
        end of their range.
        """
        pp, many, both = self.ranks.pp, numbers[:, None], self.both[at]
        halves = TwoStageRanks(self.ranks.classes, self.mixes[at], self.cuts[at])
        block, front = halves.block_f + halves.block_b, halves.front_f + halves.front_b
        none, added_by_block = halves.overlap_s(round_counts(pp, many))
        ahead = np.cumsum(front, axis=1) - front + 2 * self.hops_to
        beside = both.sum(axis=1, keepdims=True) + 2 * self.hops - none
        bound = np.zeros(len(at))
        distinct, which = np.unique(numbers, return_inverse=True)
        sets = np.array([bound_weights(pp, int(n), self.ranks.limits.max_end_ranks) for n in distinct])
        for weights in sets[which].swapaxes(0, 1):
            first, second = weights[:, 0], weights[:, 1]
            later = first.sum(axis=1, keepdims=True) - np.cumsum(first, axis=1)
            slope = later * block - second * added_by_block
            total = (first + second) * many * both + first * ahead + second * beside
            total = total + np.minimum(slope * halves.least, slope * halves.most)
            bound = np.maximum(bound, total.sum(axis=1))
        return np.asarray(bound + self.sums[at][:, 0])
