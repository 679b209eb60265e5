"""Sharing out equal pieces (blocks over stages, micro-batches over replicas), the slowest being done soonest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def split_evenly(
    total: int, seconds: Callable[[int, int], float], least: Sequence[int], most: Sequence[int]
) -> list[int] | None:
    """How many of `total` equal pieces each one gets, with the smallest possible largest time.

    Each piece in turn goes to the one that would then be done first. With times that grow with the count this is
    exact: whoever holds more than in an optimal sharing got its last piece when that made nobody slower than the
    optimum allows (exchange argument).

    Args:
        seconds: seconds(i, n), the time of number i with n pieces; must not fall with n.
        least: pieces that each one has at least.
        most: pieces that each one can hold.

    Returns:
        The counts, or None when the limits leave no way.
    """
    counts = list(least)
    if sum(least) > total or sum(most) < total or any(a > b for a, b in zip(least, most, strict=True)):
        return None
    heap = [(seconds(index, count + 1), index) for index, count in enumerate(counts) if count < most[index]]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, index = heapq.heappop(heap)
        counts[index] += 1
        if counts[index] < most[index]:
            heapq.heappush(heap, (seconds(index, counts[index] + 1), index))
    return counts
