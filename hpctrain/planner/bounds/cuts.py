"""Lower bound that enumerates every cut of the blocks; all replicas share a cut, and each has its own waits.

The knapsack bound leaves open which units (tensor-parallel groups) make up a replica. Here a replica is a choice of a
class for each of its ranks (a "mix"). Its passes say how many micro-batches it ends in a given time with a given cut.
The number of units of each class then limits the micro-batches of all replicas together.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.rank_times import RankTimes
from hpctrain.planner.bounds.replica_end import ReplicaFinish

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_CUT_MIXES = 30_000
"""Largest number of pairs of a cut and a mix that are enumerated."""
CUTS_PER_BATCH = 100
"""Cuts that are evaluated in one batch."""
MAX_MIXES = 256
"""Largest number of choices of classes for the ranks of a replica."""
MAX_CUT_CLASSES = 2
ROUNDING = 1e-9
INFEASIBLE = -1e6
"""Stands for the micro-batches of an impossible replica."""


def any_cut_finishes(ranks: RankTimes, caps: FloatArray, blocks: FloatArray, limit_s: float) -> bool:
    """False if with no cut all replicas together can end the step's micro-batches within `limit_s` seconds.

    True also if there are too many cuts to enumerate, or one rank only.

    Args:
        caps: [rank, class, blocks] -> micro-batches that a unit ends in the time, or has memory for.
        blocks: [rank] -> the most blocks that it can hold.
    """
    if ranks.pp == 1 or len(ranks.classes) > MAX_CUT_CLASSES or len(ranks.classes) ** ranks.pp > MAX_MIXES:
        return True
    mixes = _mixes(len(ranks.classes), ranks.pp)
    cuts = _cuts(ranks.layers, tuple(int(each) for each in blocks), MAX_CUT_MIXES // len(mixes))
    if cuts is None:
        return True
    least = -(-ranks.count // ranks.dp)
    most = least if ranks.cost.work.memory_options.equal_micro_batches else ranks.count - ranks.dp + 1
    # [cut, mix]
    held = np.full((len(cuts), len(mixes)), float(most))
    for rank in range(ranks.pp):
        np.minimum(held, caps[rank].T[cuts[:, rank]][:, mixes[:, rank]], out=held)
    together = _together(ranks, mixes, held)
    # Cuts with the most spare micro-batches first: one that ends in time is enough.
    order = np.argsort(-together, kind="stable")[: int((together >= ranks.count).sum())]
    return any(
        _some_end(ranks, cuts[some], mixes, held[some].astype(np.int64), limit_s * (1 + ROUNDING))
        for some in (order[start : start + CUTS_PER_BATCH] for start in range(0, len(order), CUTS_PER_BATCH))
    )


def _some_end(ranks: RankTimes, cuts: IntArray, mixes: IntArray, numbers: IntArray, limit_s: float) -> bool:
    """Whether with some cut the replicas end enough micro-batches within `limit_s` seconds.

    Args:
        numbers: [cut, mix] -> upper limit of a replica's micro-batches; modified in place.
    """
    at, mix = (each.ravel() for each in np.indices(numbers.shape))
    ends, flat, is_open = ReplicaFinish(ranks, cuts[at], mixes[mix]), numbers.reshape(-1), numbers > 0
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
    found = np.zeros((1, 0), dtype=np.int64)
    for rank, own in enumerate(most):
        left = layers - found.sum(axis=1)
        least = np.clip(left - sum(most[rank + 1 :]), 0, None)
        ways = np.clip(np.minimum(left, own) - least + 1, 0, None)
        # Every beginning of a cut can be completed, so there are at least as many cuts as beginnings.
        if ways.sum() > limit:
            return None
        begun = np.repeat(np.arange(len(found)), ways)
        added = np.arange(len(begun)) - np.repeat(np.cumsum(ways) - ways, ways) + least[begun]
        found = np.column_stack([found[begun], added])
    return found


@lru_cache(maxsize=16)
def _mixes(classes: int, pp: int) -> IntArray:
    """All mixes as [mix, rank] -> class."""
    return np.array(list(itertools.product(range(classes), repeat=pp)), dtype=np.int64)


def _together(ranks: RankTimes, mixes: IntArray, numbers: NDArray[Any]) -> FloatArray:
    """[cut] -> the most micro-batches of all replicas together, limited by the units of each class.

    Args:
        numbers: [cut, mix] -> micro-batches of a replica.
    """
    pp, dp = ranks.pp, ranks.dp
    numbers = np.where(numbers < 1, INFEASIBLE, numbers)
    first = (mixes == 0).sum(axis=1)
    # [units of the first class in a replica] -> its best number
    best = [numbers[:, first == few].max(axis=1, initial=INFEASIBLE) for few in range(pp + 1)]
    if len(ranks.classes) == 1:
        return np.asarray(dp * best[pp])
    least, most = max(0, pp * dp - ranks.classes[1].number), min(pp * dp, ranks.classes[0].number)
    found = np.full(len(numbers), INFEASIBLE)
    # The relaxed optimum, with fractions of replicas, needs at most two kinds of replica.
    for few, many in itertools.combinations(range(pp + 1), 2):
        low, high = max(least, few * dp), min(most, many * dp)
        for units in {low, high} if low <= high else ():
            part = (units - few * dp) / (many - few)
            np.maximum(found, (dp - part) * best[few] + part * best[many], out=found)
    return found
