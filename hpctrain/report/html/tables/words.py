"""Words that all tables share."""

from __future__ import annotations

from collections.abc import Callable

ABSENT = "–"


def or_absent(value: float | None, words: Callable[[float], str] = str) -> str:
    """Return a value as text by the function `words`; a dash for None."""
    return ABSENT if value is None else words(value)


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun, which gets the ending unless the count is 1: '1 node', '2 nodes'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def of_many(shown: int, count: int, noun: str) -> str:
    """Return how many rows a table shows: '48 of 8,000 devices shown'; '' if it shows all."""
    return f"{shown:,} of {count:,} {noun} shown" if shown < count else ""
