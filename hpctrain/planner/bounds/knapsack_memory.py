"""How many micro-batches a tensor-parallel group has memory for, by the blocks that it holds."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.cost.memory import MemoryModel, RankRole


def micro_batches_held(memory: MemoryModel, role: RankRole, memory_bytes: float, most: int) -> NDArray[np.float64]:
    """[blocks] -> an upper bound of the micro-batches that fit beside these blocks; infinite if `most` fit.

    Args:
        role: the rank's role; its number of micro-batches does not matter.
    """
    steps = [1]
    while steps[-1] < most:
        steps.append(min(2 * steps[-1], most))
    found = np.zeros(memory.work.spec.layers + 1)
    for number, following in zip_longest(steps, steps[1:]):
        held = _most_held(memory, role._replace(micro_batches=number), memory_bytes)
        # Numbers between two steps count as if they fitted.
        found[: held + 1] = np.inf if following is None else following - 1
    return found


def _most_held(memory: MemoryModel, role: RankRole, memory_bytes: float) -> int:
    """The most blocks of a rank for any split over its stages; -1 if not even a rank without blocks fits."""
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
    """The least bytes of all splits of the blocks over two stages; bytes are convex in the first stage's blocks."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        a, b = (memory.need(role, (first, blocks - first)) for first in (middle, middle + 1))
        low, high = (low, middle) if a <= b else (middle + 1, high)
    return memory.need(role, (low, blocks - low))
