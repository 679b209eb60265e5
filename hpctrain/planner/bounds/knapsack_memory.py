"""How many micro-batches a unit has room for, by the blocks that it holds."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.cost.memory import MemoryModel, RankRole


def micro_batches_held(memory: MemoryModel, role: RankRole, memory_bytes: float, most: int) -> NDArray[np.float64]:
    """[blocks] -> micro-batches with which a unit has room for these, or somewhat more; infinite from `most` on.

    Args:
        role: with any number of micro-batches.
    """
    steps = [1]
    while steps[-1] < most:
        steps.append(min(2 * steps[-1], most))
    found = np.zeros(memory.work.spec.layers + 1)
    for number, following in zip_longest(steps, steps[1:]):
        held = _most_held(memory, role._replace(micro_batches=number), memory_bytes)
        # What is not looked at counts as if it fitted.
        found[: held + 1] = np.inf if following is None else following - 1
    return found


def _most_held(memory: MemoryModel, role: RankRole, memory_bytes: float) -> int:
    """The most blocks of a rank, however they lie in its stages; -1 when not even none."""
    if role.stages == role.pp:
        return memory.max_blocks(role, memory_bytes)
    usable = memory.work.usable * memory_bytes
    low, high = -1, memory.work.spec.layers
    while low < high:
        middle = (low + high + 1) // 2
        fits = _least_need(memory, role, middle) <= usable
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _least_need(memory: MemoryModel, role: RankRole, blocks: int) -> float:
    """Bytes with the better of all ways to share blocks over two stages: convex in what the first one holds."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        a, b = (memory.need(role, (first, blocks - first)) for first in (middle, middle + 1))
        low, high = (low, middle) if a <= b else (middle + 1, high)
    return memory.need(role, (low, blocks - low))
