"""Who measures with whom, and when: the circle method of round-robin tournaments, in a seeded order."""

from __future__ import annotations

import random
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Round:
    """Pairs that measure at the same time; no node is in two of them."""

    pairs: tuple[Pair, ...]
    alone: bool
    """True in the pass that gives each pair the network to itself."""


def rounds(n: int, seed: int) -> list[list[Pair]]:
    """Every pair (a < b) of 0…n-1 exactly once, nobody twice in a round: n-1 rounds for even n, n for odd n.

    The nodes are put in a random order first: in the order of their names, whole rounds would cross the same uplinks
    of a fat tree at once. The same seed gives the same schedule.
    """
    rng = random.Random(seed)
    circle: list[int | None] = list(range(n))
    rng.shuffle(circle)
    if n % 2:
        circle.append(None)  # whoever meets the gap rests
    schedule = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        schedule.append(met)
        # The first stays, the others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule if n > 1 else []


def plan_rounds(n: int, seed: int, isolated_up_to: int) -> list[Round]:
    """The whole schedule: each pair alone while n is small enough for that, then full rounds.

    With two or three nodes a full round is one pair, so the pass with each pair alone would measure the same again.
    """
    full = rounds(n, seed)
    alone = [Round((pair,), alone=True) for met in full for pair in met] if 3 < n <= isolated_up_to else []
    return alone + [Round(tuple(met), alone=False) for met in full]
