"""Clock offsets between the nodes, from the offsets that pairs measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import PairResult

Offset = tuple[float, float]
"""(offset in seconds, largest error in seconds)"""


def clock_offsets(nodes: Sequence[str], pairs: Iterable[PairResult]) -> dict[str, Offset]:
    """Return each node's clock minus that of the first node, measured directly or else over other nodes.

    The first node's offset is exactly 0. A node that no chain of measured pairs connects with it is absent.
    """
    between = _between(pairs)
    known: dict[str, Offset] = {nodes[0]: (0.0, 0.0)} if nodes else {}
    edge = list(known)
    while edge:
        reached: dict[str, Offset] = {}
        for source in edge:
            offset, error = known[source]
            for target, (step, step_error) in between.get(source, {}).items():
                if target not in known and (target not in reached or error + step_error < reached[target][1]):
                    reached[target] = (offset + step, error + step_error)
        known |= reached
        edge = list(reached)
    return known


def _between(pairs: Iterable[PairResult]) -> dict[str, dict[str, Offset]]:
    """Return node -> peer -> the peer's clock minus the node's; of several measurements the most accurate."""
    best: dict[str, dict[str, Offset]] = {}
    for pair in pairs:
        for offset, error in (*_seen(pair.at_a, 1), *_seen(pair.at_b, -1)):
            if pair.b not in best.get(pair.a, {}) or error < best[pair.a][pair.b][1]:
                best.setdefault(pair.a, {})[pair.b] = (offset, error)
                best.setdefault(pair.b, {})[pair.a] = (-offset, error)
    return best


def _seen(end: PairFigures, sign: int) -> list[Offset]:
    if end.clock_offset_s is None or end.clock_error_s is None:
        return []
    return [(sign * end.clock_offset_s, end.clock_error_s)]
