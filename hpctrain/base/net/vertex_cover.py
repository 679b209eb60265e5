"""Which nodes to do without where some pairs of nodes do not reach each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

NodePair = tuple[str, str]
"""Two nodes that do not reach each other, in either order."""

EXACT_MAX_NODES = 20
"""Up to so many nodes in silent pairs the fewest to leave out are searched for; above, the one with the most silent
partners goes, again and again: the search takes 1.5 times as long for each further node."""


def vertex_cover(nodes: Sequence[str], pairs: Iterable[NodePair], first: Collection[str] = ()) -> list[str]:
    """The nodes to do without, in node order, so that all the others reach each other: as few as possible.

    Of a pair goes the node with more silent partners, else the one that is in `first`, else the later one.

    Args:
        nodes: all nodes, in order.
        pairs: those that do not reach each other; a pair with an end that is not in `nodes` counts for nothing.
        first: nodes that go before others where that leaves out no more of them: those that are left out already.
    """
    partners: dict[str, set[str]] = {}
    known = set(nodes)
    for a, b in pairs:
        if a != b and {a, b} <= known:
            partners.setdefault(a, set()).add(b)
            partners.setdefault(b, set()).add(a)
    rank = {node: (node in first, place) for place, node in enumerate(nodes) if node in partners}
    search = _minimum_cover if len(partners) <= EXACT_MAX_NODES else _greedy_cover
    out = search(partners, rank)
    return [node for node in nodes if node in out]


_Rank = dict[str, tuple[bool, int]]
"""Node -> whether it goes before others, and its place: the highest goes first."""


def _greedy_cover(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    out: set[str] = set()
    while partners:
        node = _highest_degree(partners, rank)
        out.add(node)
        partners = _without(partners, {node})
    return out


def _minimum_cover(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    """Either the most silent node goes, or all of its partners do: the better of both, found in the same way."""
    if not partners:
        return set()
    node = _highest_degree(partners, rank)
    without_it = {node} | _minimum_cover(_without(partners, {node}), rank)
    if len(partners[node]) == 1:
        return without_it  # what is left are pairs that have nothing to do with each other
    with_it = partners[node] | _minimum_cover(_without(partners, partners[node] | {node}), rank)
    return with_it if _cover_cost(with_it, rank) < _cover_cost(without_it, rank) else without_it


def _cover_cost(out: set[str], rank: _Rank) -> tuple[int, int]:
    return len(out), sum(not rank[node][0] for node in out)


def _highest_degree(partners: dict[str, set[str]], rank: _Rank) -> str:
    return max(partners, key=lambda node: (len(partners[node]), rank[node]))


def _without(partners: dict[str, set[str]], gone: set[str]) -> dict[str, set[str]]:
    rest = {node: others - gone for node, others in partners.items() if node not in gone}
    return {node: others for node, others in rest.items() if others}
