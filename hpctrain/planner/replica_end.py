"""When a replica is done at least, by its cut, the classes of its units and its micro-batches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.passes import early_forwards
from hpctrain.schedule.generate import SPLIT_BACKWARD
from hpctrain.schedule.rounds import interleave

if TYPE_CHECKING:
    from hpctrain.planner.columns import Columns

Values = NDArray[np.float64]
Counts = NDArray[np.int64]

LIKE = (1 / 3, 2 / 3)
"""Forward and backward of a rank, as parts of both, that the weights of bounds are made for."""
SMALL = 0.6
"""Of the other ranks' time, what the first or the last one takes in some of the cuts that weights are made for."""


class ReplicaEnd:
    """Many replicas at once.

    Args:
        cuts: [replica, rank] -> blocks.
        mixes: [replica, rank] -> class of the unit.
    """

    def __init__(self, columns: Columns, cuts: Counts, mixes: Counts) -> None:
        self.columns, self.cuts, self.mixes = columns, cuts, mixes
        times, pp = columns.times, columns.pp
        rank = np.arange(pp)
        self.forward, self.backward, self.both, self.sums = (
            each[rank, mixes, cuts] for each in (times.forward, times.backward, times.both, times.sums)
        )
        self.update = times.update[rank, mixes, cuts].max(axis=1)
        passes = columns.passes
        # [rank] -> messages of a way through the ranks up to this one, and from this one on
        self.hops_to = np.array([passes.hops_s(each + 1) for each in rank])
        self.hops_from = self.hops_to[::-1]
        self.hops = passes.one_way_s

    def end_s(self, at: Counts, numbers: Counts) -> Values:
        """Seconds until these replicas are done with so many micro-batches each, summed and updated."""
        order = self.columns.order
        found = self._own(at, numbers)
        if order.chunks == 1 and order.schedule not in SPLIT_BACKWARD:
            found = np.maximum(found, self._there_and_back(at, numbers))
        elif order.schedule == "interleaved_1f1b":
            found = np.maximum(found, self._interleaved(at, numbers))
        return found + self.update[at]

    def _own(self, at: Counts, numbers: Counts) -> Values:
        """A way through all stages comes before each rank's first backward."""
        many, early = numbers[:, None], early_forwards(self.columns.order, self.columns.pp)
        forward = self.forward[at]
        way = forward.sum(axis=1, keepdims=True) + self.hops
        after = many * self.both[at] - np.minimum(many, early) * forward + self.sums[at]
        return np.asarray((way + after).max(axis=1))

    def _there_and_back(self, at: Counts, numbers: Counts) -> Values:
        """With one stage a rank and whole backwards: what comes before a rank's first forward, and after its last
        backward; a whole pass, and whatever else the rank does; and trips from each rank to the end."""
        pp, many = self.columns.pp, numbers[:, None]
        forward, backward, both, sums = (each[at] for each in (self.forward, self.backward, self.both, self.sums))
        way_in = np.cumsum(forward, axis=1) - forward + self.hops_to
        way_out = np.cumsum(backward, axis=1) - backward + self.hops_to
        busy = many * both
        early = np.minimum(many, early_forwards(self.columns.order, pp))
        one_pass = both.sum(axis=1, keepdims=True) + 2 * self.hops
        to_first = np.maximum(way_in + busy + way_out, one_pass + busy - early * forward - backward)
        if self.columns.order.schedule == "1f1b":
            trip = np.cumsum(both[:, ::-1], axis=1)[:, ::-1] + 2 * self.hops_from
            to_first = np.maximum(to_first, way_in + way_out + np.ceil(many / (pp - np.arange(pp))) * trip)
        own = (way_in + busy + sums).max(axis=1)
        return np.asarray(np.maximum(own, to_first.max(axis=1) + sums[:, 0]))

    def _interleaved(self, at: Counts, numbers: Counts) -> Values:
        """With two stages a rank, of which nobody knows how the rank's blocks are shared out over them.

        `_weights` of two sets of bounds are added up, so that any sharing out makes some of them large. One: rank r
        starts after the first stages of those before it, and ends before their last backwards. The other: a whole
        pass, with all that rank r does between its first and its last backward of its second stage.
        """
        columns, many = self.columns, numbers[:, None]
        pp, classes, mixes, cuts = columns.pp, columns.classes, self.mixes[at], self.cuts[at]
        every, which = np.unique(numbers, return_inverse=True)
        tables = [_around(pp, int(each)) for each in every]
        before, between, after = (np.array(ways)[which] for ways in zip(*(each[:3] for each in tables), strict=True))
        block_f, block_b = (np.array([each.block[way] for each in classes])[mixes] for way in (0, 1))
        action = np.array([each.action for each in classes])[mixes]
        front_f, front_b, back_f, back_b = action.copy(), action.copy(), action.copy(), action.copy()
        for way, (front, back) in enumerate(((front_f, back_f), (front_b, back_b))):
            front[:, 0] += np.array([each.embedding[way] for each in classes])[mixes[:, 0]]
            back[:, -1] += np.array([each.head[way] for each in classes])[mixes[:, -1]]
        ranks, both = np.arange(pp), self.both[at]
        least = np.broadcast_to((ranks > 0).astype(float), cuts.shape)
        most = np.maximum(cuts - (ranks < pp - 1), least)
        one_pass = both.sum(axis=1, keepdims=True) + 2 * self.hops
        # Both kinds of bounds are linear in the blocks of the first stages: with none there, and by a block more.
        none_f, none_b = back_f + cuts * block_f, back_b + cuts * block_b
        ahead = np.cumsum(front_f + front_b, axis=1) - front_f - front_b + 2 * self.hops_to
        beside = one_pass - before * front_f - between * none_f - after * front_b - none_b
        more = (before - between) * block_f + (after - 1) * block_b
        found = np.zeros(len(at))
        for weights in np.array([each.weights for each in tables])[which].swapaxes(0, 1):
            first, second = weights[:, 0], weights[:, 1]
            later = first.sum(axis=1, keepdims=True) - np.cumsum(first, axis=1)
            slope = later * (block_f + block_b) - second * more
            added = (first + second) * many * both + first * ahead + second * beside
            added = added + slope * np.where(slope > 0, least, most)
            found = np.maximum(found, added.sum(axis=1))
        return found + self.sums[at][:, 0]


class _Around(NamedTuple):
    """What interleaved 1f1b does on each rank before its first backward, and after the last of its second stage."""

    before: Values
    """[rank] -> forwards of the first stage."""
    between: Values
    """[rank] -> forwards of the second stage."""
    after: Values
    """[rank] -> backwards of the first stage."""
    weights: Values
    """[set, first or second kind of bound, rank] -> weights for `_interleaved`."""


@lru_cache(maxsize=1024)
def _around(pp: int, micro_batches: int) -> _Around:
    found = np.zeros((3, pp))
    for rank in range(pp):
        turns = interleave(rank, pp, 2 * pp, micro_batches, spacing=2)
        forwards = [*turns.warmup, *[forward for forward, _ in turns.pairs[:1] if forward]]
        stages = [stage for _, (stage, _) in turns.pairs]
        found[0, rank] = sum(action.stage == rank for action in forwards)
        found[1, rank] = len(forwards) - found[0, rank]
        found[2, rank] = len(stages) - 1 - max(index for index, stage in enumerate(stages) if stage != rank)
    profiles = np.ones((4, pp))
    profiles[1:3, -1] = profiles[2:, 0] = SMALL
    return _Around(*found, np.array([_weights(each, micro_batches, found) for each in profiles]))


def _weights(rank_s: Values, micro_batches: int, around: Values) -> Values:
    """Weights that add up to one, of the bounds of `_interleaved`: the best ones for ranks that take so long.

    They are the dual of: the least step over all ways to share out the ranks' blocks over their two stages. With any
    weights the sum is a bound.
    """
    from scipy.optimize import linprog  # takes long to load, and few options come here

    pp, (before, between, after), (forward, backward) = len(rank_s), around, LIKE
    # Variables: the first stage's seconds of each rank, and the step; every row is a bound.
    step = -np.ones((pp, 1))
    ahead = np.hstack([np.tril(np.ones((pp, pp)), -1), step])
    own = (between - before) * forward + (1 - after) * backward
    beside = np.hstack([np.diag(own), step])
    busy = micro_batches * rank_s
    right = np.concatenate([-busy, -(busy + rank_s.sum() - (between * forward + backward) * rank_s)])
    bounds = [*[(0, each) for each in rank_s], (None, None)]
    found = linprog([*np.zeros(pp), 1.0], np.vstack([ahead, beside]), right, bounds=bounds, method="highs")
    weights = np.maximum(-found.ineqlin.marginals, 0)
    return np.asarray((weights / weights.sum()).reshape(2, pp))
