"""Lower bound that enumerates every cut of the blocks; all replicas share a cut, and each has its own waits.

The knapsack bound leaves open which tensor-parallel groups make up a replica. Here a replica is a choice of a class of
groups for each of its ranks (a "mix"). `PipelinePasses` says how many micro-batches a mix ends in a given time with a
given cut. The number of groups of each class then limits the micro-batches of all replicas together.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.arrays import INFEASIBLE, ROUNDING, FloatArray, IntArray
from hpctrain.planner.bounds.rank_times import RankTimes
from hpctrain.planner.bounds.replica_end import ReplicaFinish


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
