"""Divides a whole number into parts that differ by at most 1."""

from __future__ import annotations


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """Return `count` whole numbers that add up to `total` and differ by at most 1, the larger ones first."""
    return tuple(total // count + (index < total % count) for index in range(count))
