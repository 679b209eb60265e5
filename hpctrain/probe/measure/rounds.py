"""Who measures with whom, and when: the circle method of round-robin tournaments, in a seeded order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from hpctrain.probe.measure.settings import Mode, ProbeSettings

Pair = tuple[int, int]

Purpose = Literal["pairs", "contention", "retest"]


@dataclass(frozen=True)
class Round:
    """Pairs that measure at the same time; no node is in two of them. The first of a pair calls, and sends first."""

    pairs: tuple[Pair, ...]
    alone: bool
    """True when so few pairs are at work that each has the network to itself."""
    purpose: Purpose = "pairs"
    """pairs: figures of links. contention: what a level of switches carries. retest: a suspect with a good partner."""


def rounds(n: int, seed: int, most: int | None = None) -> list[list[Pair]]:
    """Every pair (a < b) of 0…n-1 exactly once, nobody twice in a round: n-1 rounds for even n, n for odd n.

    The nodes are put in a random order first: in the order of their names, whole rounds would cross the same uplinks
    of a fat tree at once. The same seed gives the same schedule.

    Args:
        most: only so many rounds, from the start.
    """
    rng = random.Random(seed)
    circle: list[int | None] = list(range(n))
    rng.shuffle(circle)
    if n % 2:
        circle.append(None)  # whoever meets the gap rests
    schedule = []
    for _ in islice(range(len(circle) - 1), most):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        schedule.append(met)
        # The first stays, the others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule if n > 1 else []


def plan_rounds(n: int, settings: ProbeSettings) -> list[Round]:
    """The rounds to begin with: all of them, or as many as the mode has; few nodes first measure each pair alone.

    With two or three nodes a full round is one pair, so the pass with each pair alone would measure the same again.
    """
    begin: dict[Mode, int | None] = {
        "full": None,
        "health": settings.health_rounds,
        "sampled": settings.sampled_rounds,
    }
    met = rounds(n, settings.seed, begin[settings.mode])
    isolated = settings.mode == "full" and 3 < n <= settings.isolated_up_to
    alone = [Round((pair,), alone=True) for pairs in met for pair in pairs] if isolated else []
    # Who sends first is drawn: if it were the one with the smaller number, the first switch would only send at first.
    rng = random.Random(settings.seed)
    drawn = [tuple(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs) for pairs in met]
    return alone + [Round(pairs, alone=False) for pairs in drawn]
