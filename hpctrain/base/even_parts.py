"""A number cut into equal whole parts."""

from __future__ import annotations


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """`count` whole numbers that add up to `total`; what does not divide goes to the first ones."""
    return tuple(total // count + (index < total % count) for index in range(count))
