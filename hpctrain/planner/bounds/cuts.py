"""Lower bound of the step time that enumerates every cut of the blocks. All replicas share a cut; each replica has
waiting times of its own.

The knapsack bound leaves open which tensor-parallel groups make up a replica. Here a replica is a "mix": for each
pipeline rank, the class (`UnitClass`) of the tensor-parallel group that the replica has there. `ReplicaFinish` says
when a mix with a given cut ends its micro-batches. The number of groups of each class then limits the micro-batches of
all replicas together.

The bounds for interleaved 1F1B hold with two stages on each pipeline rank, for any split of a rank's blocks over its
stages. They count what ranks compute while the pipeline fills and drains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.arrays import INFEASIBLE, ROUNDING, FloatArray, IntArray
from hpctrain.planner.bounds.rank_times import RankTimes, warmup_forwards
from hpctrain.planner.bounds.unit_counts import UnitClass


def any_cut_finishes(ranks: RankTimes, caps: FloatArray, blocks: FloatArray, limit_s: float) -> bool:
    """Return False if there is no cut with which all replicas together end the step's micro-batches within `limit_s`
    seconds.

    The result is True without a check if there is only one pipeline rank, or if there are too many cuts or too many
    choices of classes for the ranks to enumerate.

    Args:
        caps: [pipeline rank, class of tensor-parallel groups (`UnitClass`), number of blocks] -> the most micro-batches
            for which a group of the class has the time and memory.
        blocks: [pipeline rank] -> the most blocks that the pipeline rank can hold.
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
    """Return whether, with at least one cut, the replicas end the step's micro-batches within `limit_s` seconds.

    Args:
        cuts: [cut, rank] -> blocks.
        mixes: [mix, rank] -> class of the group at this pipeline rank. A mix is a choice of classes for a replica.
        numbers: [cut, mix] -> upper limit of a replica's micro-batches; the function lowers the entries in place.
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
    """Return all cuts of a model's blocks into ranks, as [cut, rank] -> number of blocks; None if there are more cuts
    than `limit`.

    Args:
        layers: number of the model's blocks.
        most: [rank] -> largest number of blocks that the rank may have.
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
    """Return all mixes (choices of a class of tensor-parallel groups for each pipeline rank): [mix, rank] -> class."""
    return np.array(list(itertools.product(range(classes), repeat=pp)), dtype=np.int64)


def _together(ranks: RankTimes, mixes: IntArray, numbers: NDArray[Any]) -> FloatArray:
    """Return [cut] -> an upper bound of the micro-batches of all replicas together. All replicas together
    have at most `UnitClass.number` tensor-parallel groups of each class.

    Args:
        mixes: [mix, rank] -> class of the group at this pipeline rank. A mix is a choice of classes for a replica.
        numbers: [cut, mix] -> the most micro-batches of one replica.
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
    """Lower bounds of the time at which a replica ends its step, computed for many replicas at once.

    Args:
        cuts: [replica, rank] -> number of blocks.
        mixes: [replica, rank] -> class of the tensor-parallel group.
    """

    def __init__(self, ranks: RankTimes, cuts: IntArray, mixes: IntArray) -> None:
        self.ranks, self.cuts, self.mixes = ranks, cuts, mixes
        rank = np.arange(ranks.pp)
        self.forward, self.backward, self.both, self.sums, self.late, update = (
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
        """Return, for each of the replicas `at`, the least seconds until it has done its micro-batches, all-reduce and
        update.

        Args:
            at: indices of the replicas.
            numbers: number of micro-batches of each of these replicas.
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
        """Return, for each of the replicas `at`, a lower bound of the seconds until it has done its micro-batches and
        its all-reduce. The bound counts, before each rank's first backward, the forward pass of a micro-batch through
        all stages. The arguments are those of `end_s`.
        """
        many, forward = numbers[:, None], self.forward[at]
        first_pass = forward.sum(axis=1, keepdims=True) + self.hops
        after = many * self.both[at] - np.minimum(many, self.early) * forward + self.sums[at]
        return np.asarray((first_pass + after).max(axis=1))

    def _there_and_back(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Return, for each of the replicas `at`, a lower bound of the seconds until it has done its micro-batches and
        its all-reduce, with a schedule that has one stage a rank and whole backwards.

        The result is the larger of two bounds, each the largest over all pipeline ranks. One bound counts what comes
        before a rank's first forward, the rank's own actions, and its all-reduce. The other bound counts the all-reduce
        of rank 0 after the largest of three terms. The first term adds to a rank's own actions what comes before its
        first forward and after its last backward. The second term counts one micro-batch's pass through the pipeline
        and back, and those actions of a rank that cannot overlap this pass. The third term, for 1f1b only, counts round
        trips from a rank to the last rank and back, and what comes before and after them.

        Args:
            at: indices of the replicas.
            numbers: number of micro-batches of each of these replicas.
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
        return np.asarray(np.maximum(last_sum, to_first.max(axis=1) + self.late[at][:, 0]))

    def _interleaved(self, at: IntArray, numbers: IntArray) -> FloatArray:
        """Return, for each of the replicas `at`, a lower bound of the seconds until it has done its micro-batches and
        its all-reduce, with two stages a rank and any split of a rank's blocks over its two stages.

        The weighted bounds of `bound_weights` are linear in the number of blocks that each rank's first stage holds, so
        the least sum is at an end of the range of this number.

        Args:
            at: indices of the replicas.
            numbers: number of micro-batches of each of these replicas.
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
        return np.asarray(bound + self.late[at][:, 0])


REFERENCE_SPLIT = (1 / 3, 2 / 3)
"""Split of a pass into (forward, backward) that the weights of the bounds are tuned for; the bounds hold with any
split.
"""
MIN_OVERLAP = 1e-3
"""Smallest overlap by which `bound_weights` divides, as a multiple of a block's time for one micro-batch."""


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


@lru_cache(maxsize=1024)
def bound_weights(pp: int, micro_batches: int, end_ranks: int) -> FloatArray:
    """Return [set, kind, rank] -> weight of a lower bound on a replica's time. A set is one choice of weights for the
    bounds of all ranks; its weights add up to one. The schedule is interleaved 1F1B with two stages on each rank.

    Each rank has two kinds of bound. In the first kind, rank r starts after the first stages of the ranks before it,
    and ends before their last backwards. The second kind is a whole pass, plus all that rank r does between its first
    backward and the last backward of its second stage. Blocks in first stages lengthen the first kind and shorten the
    second. Each set weighs the bounds of consecutive ranks, and no others: that of the first kind for the last of these
    ranks, those of the second kind for the ranks before it. If forward and backward take the shares `REFERENCE_SPLIT`
    of a block's time, the weighted sum does not depend on which of a rank's two stages holds the blocks.

    Args:
        end_ranks: the consecutive ranks of a set begin with one of the first `end_ranks` ranks of the pipeline, and end
            with one of its last `end_ranks` ranks.
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
