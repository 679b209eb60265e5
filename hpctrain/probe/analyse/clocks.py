"""Computes each node's clock offset from the offsets that pairs of nodes measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.probe.measure.outcome import PairResult

Offset = tuple[float, float]
"""(offset in seconds, largest error in seconds)"""


def clock_offsets(nodes: Sequence[str], pairs: Iterable[PairResult]) -> dict[str, Offset]:
    """Return each node's clock minus the first node's clock, in seconds, measured directly or else over other nodes.

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
    for seen in (view for pair in pairs for view in pair.from_both_ends()):
        offset, error = seen.at_a.clock_offset_s, seen.at_a.clock_error_s
        if offset is None or error is None:
            continue
        if seen.b not in best.get(seen.a, {}) or error < best[seen.a][seen.b][1]:
            best.setdefault(seen.a, {})[seen.b] = (offset, error)
            best.setdefault(seen.b, {})[seen.a] = (-offset, error)
    return best
