"""A number cut into equal whole parts."""

from __future__ import annotations


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """Return `count` whole numbers that add up to `total`; where it does not divide evenly, the first ones are larger
    by 1."""
    return tuple(total // count + (index < total % count) for index in range(count))
