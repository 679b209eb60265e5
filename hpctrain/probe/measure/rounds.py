"""Makes the rounds of a probe by the circle method of round-robin tournaments, in a seeded random order."""

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
    """Pairs that measure at the same time, no node twice. The first node of a pair connects and sends first."""

    pairs: tuple[Pair, ...]
    alone: bool
    """Whether so few pairs measure that each has the network to itself."""
    purpose: Purpose = "pairs"
    """pairs: figures of links. contention: bandwidth of a switch level. retest: suspects with good partners."""


def rounds(n: int, seed: int, most: int | None = None) -> list[list[Pair]]:
    """Return rounds with all pairs (a < b) of 0…n-1 once, no node twice in a round: n-1 rounds for even n, n for odd n.

    The nodes are shuffled first: in the order of their names, all pairs of a round would cross the same uplinks of a
    fat tree at once. The same seed gives the same schedule.

    Args:
        most: return only the first so many rounds.
    """
    rng = random.Random(seed)
    circle: list[int | None] = list(range(n))
    rng.shuffle(circle)
    if n % 2:
        circle.append(None)  # the partner of None pauses
    schedule = []
    for _ in islice(range(len(circle) - 1), most):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        schedule.append(met)
        # The first node stays, the others move by one position.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule if n > 1 else []


def plan_rounds(n: int, settings: ProbeSettings) -> list[Round]:
    """Return the first rounds of a probe: all rounds, or as many as the mode begins with.

    In the mode full, few nodes first measure each pair alone. With two or three nodes a round is one pair anyway.
    """
    begin: dict[Mode, int | None] = {
        "full": None,
        "health": settings.health_rounds,
        "sampled": settings.sampled_rounds,
    }
    met = rounds(n, settings.seed, begin[settings.mode])
    isolated = settings.mode == "full" and 3 < n <= settings.isolated_up_to
    alone = [Round((pair,), alone=True) for pairs in met for pair in pairs] if isolated else []
    # The first sender is drawn: if it were always the smaller number, the first switch would at first only send.
    rng = random.Random(settings.seed)
    drawn = [tuple(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs) for pairs in met]
    return alone + [Round(pairs, alone=False) for pairs in drawn]
