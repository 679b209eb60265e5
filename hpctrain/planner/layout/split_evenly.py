"""Distribution of equal pieces (blocks over stages, micro-batches over replicas) with the smallest maximum time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def split_evenly(
    total: int, seconds: Callable[[int, int], float], least: Sequence[int], most: Sequence[int]
) -> list[int] | None:
    """Distribute `total` equal pieces over receivers so that the largest time is as small as possible.

    Each piece goes to the receiver that would then have the smallest time. This is exact if times grow with the count
    (exchange argument): a receiver with more pieces than in an optimal distribution got its last piece when it still
    stayed within the optimal time.

    Args:
        seconds: seconds(i, n), the time of receiver i with n pieces; must not fall as n grows.
        least: the fewest pieces of each receiver.
        most: the most pieces of each receiver.

    Returns:
        The pieces of each receiver, or None if the limits cannot be met.
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
