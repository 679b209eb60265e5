"""Lower bound that enumerates every cut of the blocks; all replicas share a cut, and each has its own waits.

The knapsack bound leaves open which tensor-parallel groups make up a replica. Here a replica is a choice of a class of
groups for each of its ranks (a "mix"). `ReplicaFinish` says when a mix with a given cut ends its micro-batches. The
number of groups of each class then limits the micro-batches of all replicas together.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.arrays import INFEASIBLE, ROUNDING, FloatArray, IntArray
from hpctrain.planner.bounds.interleaved import TwoStageRanks, bound_weights, round_counts
from hpctrain.planner.bounds.rank_times import RankTimes, warmup_forwards


def any_cut_finishes(ranks: RankTimes, caps: FloatArray, blocks: FloatArray, limit_s: float) -> bool:
    """False if all replicas together cannot end the step's micro-batches within `limit_s` seconds with any cut.

    The answer is also True if there is only one rank, or if there are too many cuts to enumerate.

    Args:
        caps: [rank, class, blocks] -> the most micro-batches that a tensor-parallel group has the time and memory for.
        blocks: [rank] -> the most blocks that the rank can hold.
    """
    limits, classes = ranks.limits, len(ranks.classes)
    if ranks.pp == 1 or classes > limits.max_cut_classes or classes**ranks.pp > limits.max_mixes:
        return True
    mixes = _mixes(classes, ranks.pp)
    cuts = _cuts(ranks.layers, tuple(map(int, blocks)), limits.max_cut_mixes // len(mixes))
    if cuts is None:
        return True
    least = -(-ranks.count // ranks.dp)
    most = least if ranks.cost.work.memory_options.equal_micro_batches else ranks.count - ranks.dp + 1
    # [cut, mix]
    numbers = np.full((len(cuts), len(mixes)), float(most))
    for rank in range(ranks.pp):
        np.minimum(numbers, caps[rank].T[cuts[:, rank]][:, mixes[:, rank]], out=numbers)
    together = _together(ranks, mixes, numbers)
    # Cuts with the most spare micro-batches come first: one cut that ends in time is enough.
    order = np.argsort(-together, kind="stable")[: int((together >= ranks.count).sum())]
    batches = (order[start : start + limits.cuts_per_batch] for start in range(0, len(order), limits.cuts_per_batch))
    return any(
        _some_end(ranks, cuts[batch], mixes, numbers[batch].astype(np.int64), limit_s * (1 + ROUNDING))
        for batch in batches
    )


def _some_end(ranks: RankTimes, cuts: IntArray, mixes: IntArray, numbers: IntArray, limit_s: float) -> bool:
    """Whether the replicas end enough micro-batches within `limit_s` seconds with at least one cut.

    Args:
        numbers: [cut, mix] -> upper limit of a replica's micro-batches; modified in place.
    """
    cut, mix = (indices.ravel() for indices in np.indices(numbers.shape))
    ends, flat, is_open = ReplicaFinish(ranks, cuts[cut], mixes[mix]), numbers.reshape(-1), numbers > 0
    while is_open.any():
        asked = np.flatnonzero(is_open)
        late = ends.end_s(asked, flat[asked]) > limit_s
        is_open.reshape(-1)[asked[~late]] = False
        if (_together(ranks, mixes, np.where(is_open, 0, numbers)) >= ranks.count).any():
            return True
        flat[asked[late]] -= 1
        is_open &= (numbers > 0) & (_together(ranks, mixes, numbers) >= ranks.count)[:, None]
    return False


@lru_cache(maxsize=16)
def _cuts(layers: int, most: tuple[int, ...], limit: int) -> IntArray | None:
    """All cuts as [cut, rank] -> blocks; None if there are more than `limit`.

    Args:
        most: [rank] -> largest number of blocks.
    """
    cuts = np.zeros((1, 0), dtype=np.int64)
    for rank, largest in enumerate(most):
        missing = layers - cuts.sum(axis=1)
        least = np.clip(missing - sum(most[rank + 1 :]), 0, None)
        choices = np.clip(np.minimum(missing, largest) - least + 1, 0, None)
        # Every beginning of a cut can be completed, so there are at least as many cuts as beginnings.
        if choices.sum() > limit:
            return None
        begun = np.repeat(np.arange(len(cuts)), choices)
        added = np.arange(len(begun)) - np.repeat(np.cumsum(choices) - choices, choices) + least[begun]
        cuts = np.column_stack([cuts[begun], added])
    return cuts


@lru_cache(maxsize=16)
def _mixes(classes: int, pp: int) -> IntArray:
    """All mixes (choices of a class for each pipeline rank) as [mix, rank] -> class."""
    return np.array(list(itertools.product(range(classes), repeat=pp)), dtype=np.int64)


def _together(ranks: RankTimes, mixes: IntArray, numbers: NDArray[Any]) -> FloatArray:
    """[cut] -> the most micro-batches of all replicas together, limited by the tensor-parallel groups of each class.

    Args:
        numbers: [cut, mix] -> micro-batches of a replica.
    """
    pp, dp = ranks.pp, ranks.dp
    numbers = np.where(numbers < 1, INFEASIBLE, numbers)
    first = (mixes == 0).sum(axis=1)
    # [groups of the first class in a replica] -> the most micro-batches of such a replica
    best = [numbers[:, first == few].max(axis=1, initial=INFEASIBLE) for few in range(pp + 1)]
    if len(ranks.classes) == 1:
        return np.asarray(dp * best[pp])
    least, most = max(0, pp * dp - ranks.classes[1].number), min(pp * dp, ranks.classes[0].number)
    total = np.full(len(numbers), INFEASIBLE)
    # The optimum of the relaxed problem, which allows fractions of replicas, needs at most two kinds of replica.
    for few, many in itertools.combinations(range(pp + 1), 2):
        low, high = max(least, few * dp), min(most, many * dp)
        for units in {low, high} if low <= high else ():
            part = (units - few * dp) / (many - few)
            np.maximum(total, (dp - part) * best[few] + part * best[many], out=total)
    return total


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
