"""A bound that goes through every cut of the blocks: replicas have a cut in common, and wait within themselves.

The bound by columns leaves open which units make up a replica. Here a replica is a choice of a class for each of its
ranks, and what it does in a given time by a given cut is known from its own passes. The most micro-batches of all
replicas together follow from how many units of each class there are.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.replica_end import ReplicaEnd

if TYPE_CHECKING:
    from hpctrain.planner.columns import Columns

Values = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_REPLICAS = 60_000
"""Pairs of a cut of the blocks into ranks and a choice of classes that are gone through."""
MOST_CLASSES = 2
NEVER = -1e6
"""Micro-batches of a replica that cannot be."""


def some_cut_ends(columns: Columns, caps: Values, blocks: Values, limit_s: float) -> bool:
    """False when by no cut all replicas together do the step's micro-batches in the time.

    True, too, where there are too many cuts to tell. With one rank there is nothing to cut.

    Args:
        caps: [rank, class, blocks] -> micro-batches that a unit ends in the time, or has room for.
        blocks: [rank] -> the most that it can hold.
    """
    if columns.pp == 1 or len(columns.classes) > MOST_CLASSES:
        return True
    mixes = _mixes(len(columns.classes), columns.pp)
    cuts = _cuts(columns.layers, tuple(int(each) for each in blocks), MOST_REPLICAS // len(mixes))
    if cuts is None:
        return True
    least = -(-columns.count // columns.dp)
    most = least if columns.cost.work.saving.equal_counts else columns.count - columns.dp + 1
    # [cut, mix]
    held = np.full((len(cuts), len(mixes)), float(most))
    for rank in range(columns.pp):
        np.minimum(held, caps[rank].T[cuts[:, rank]][:, mixes[:, rank]], out=held)
    enough = _together(columns, mixes, held) >= columns.count
    if not enough.any():
        return False
    cuts, held = cuts[enough], held[enough]
    at, mix = (each.ravel() for each in np.indices(held.shape))
    ends = ReplicaEnd(columns, cuts[at], mixes[mix])
    numbers = held.astype(np.int64).ravel()
    active = np.flatnonzero(numbers > 0)
    while active.size:
        late = ends.end_s(active, numbers[active]) > limit_s * (1 + 1e-9)
        active = active[late]
        numbers[active] -= 1
        active = active[numbers[active] > 0]
    return bool((_together(columns, mixes, numbers.reshape(held.shape).astype(float)) >= columns.count).any())


@lru_cache(maxsize=16)
def _cuts(layers: int, most: tuple[int, ...], limit: int) -> Counts | None:
    """[cut, rank] -> blocks; None when there are more than `limit` cuts.

    Args:
        most: [rank] -> blocks.
    """
    found = np.zeros((1, 0), dtype=np.int64)
    for rank, own in enumerate(most):
        left = layers - found.sum(axis=1)
        least = np.clip(left - sum(most[rank + 1 :]), 0, None)
        ways = np.clip(np.minimum(left, own) - least + 1, 0, None)
        # What is begun can always be ended, so there are at least as many cuts as beginnings.
        if ways.sum() > limit:
            return None
        begun = np.repeat(np.arange(len(found)), ways)
        added = np.arange(len(begun)) - np.repeat(np.cumsum(ways) - ways, ways) + least[begun]
        found = np.column_stack([found[begun], added])
    return found


@lru_cache(maxsize=16)
def _mixes(classes: int, pp: int) -> Counts:
    """[mix, rank] -> class."""
    return np.array(list(itertools.product(range(classes), repeat=pp)))


def _together(columns: Columns, mixes: Counts, numbers: Values) -> Values:
    """[cut] -> micro-batches of all replicas at most, with no more units of a class than there are.

    Args:
        numbers: [cut, mix] -> micro-batches of a replica.
    """
    pp, dp = columns.pp, columns.dp
    numbers = np.where(numbers < 1, NEVER, numbers)
    first = (mixes == 0).sum(axis=1)
    best = np.stack(
        [numbers[:, first == few].max(axis=1, initial=NEVER) for few in range(pp + 1)], axis=1
    )  # [cut, units of the first class in a replica]
    if len(columns.classes) == 1:
        return dp * best[:, pp]
    least, most = max(0, pp * dp - columns.classes[1].number), min(pp * dp, columns.classes[0].number)
    found = np.full(len(numbers), NEVER)
    # Of replicas that differ, two kinds are enough if they need not come whole.
    for few, many in itertools.combinations(range(pp + 1), 2):
        low, high = max(least, few * dp), min(most, many * dp)
        for units in {low, high} if low <= high else ():
            part = (units - few * dp) / (many - few)
            np.maximum(found, (dp - part) * best[:, few] + part * best[:, many], out=found)
    return found
