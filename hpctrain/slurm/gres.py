"""Generic resources (GRES) as Slurm writes them: typed GPUs, MIG slices, sockets in brackets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")
_BRACKETS = re.compile(r"\([^)]*\)")
_COUNT = re.compile(r"(\d{1,18})([KMGTP]?)", re.IGNORECASE | re.ASCII)
_FACTOR = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


@dataclass(frozen=True)
class Gres:
    """The count of one resource on a node: ('gpu', 'a100', 4)."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Return the resources of a node: 'gpu:a100:4(S:0-1),gpu:a100_3g.20gb:2' -> two; () for '(null)'."""
    if text in ("", "(null)", "N/A"):
        return ()
    return tuple(_parse_one(_BRACKETS.sub("", item)) for item in _OUTSIDE_BRACKETS.split(text) if item)


def gpu_count(gres: Iterable[Gres], gpu_type: str | None = None) -> int:
    """Return the number of GPUs of a node, of one type or of all; a MIG slice counts as one."""
    return sum(item.count for item in gres if item.name == "gpu" and gpu_type in (None, item.type))


def _parse_one(text: str) -> Gres:
    name, *rest = [part for part in text.split(":") if part != "no_consume"]
    counted = _COUNT.fullmatch(rest[-1]) if rest else None
    if counted:
        rest = rest[:-1]
    count = int(counted[1]) * _FACTOR[counted[2].upper()] if counted else 1
    return Gres(name.removeprefix("gres/"), rest[0] if rest else None, count)
