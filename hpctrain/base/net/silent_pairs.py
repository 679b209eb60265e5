"""Which nodes to do without where some pairs of nodes do not reach each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Pair = tuple[str, str]
"""Two nodes that do not reach each other, in either order."""

EXACT_UP_TO = 20
"""Up to so many nodes in silent pairs the fewest to leave out are searched for; above, the one with the most silent
partners goes, again and again: the search takes 1.5 times as long for each further node."""


def leave_out(nodes: Sequence[str], pairs: Iterable[Pair], first: Collection[str] = ()) -> list[str]:
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
    search = _fewest if len(partners) <= EXACT_UP_TO else _most_silent_first
    out = search(partners, rank)
    return [node for node in nodes if node in out]


_Rank = dict[str, tuple[bool, int]]
"""Node -> whether it goes before others, and its place: the highest goes first."""


def _most_silent_first(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    out: set[str] = set()
    while partners:
        node = _most_silent(partners, rank)
        out.add(node)
        partners = _without(partners, {node})
    return out


def _fewest(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    """Either the most silent node goes, or all of its partners do: the better of both, found in the same way."""
    if not partners:
        return set()
    node = _most_silent(partners, rank)
    without_it = {node} | _fewest(_without(partners, {node}), rank)
    if len(partners[node]) == 1:
        return without_it  # what is left are pairs that have nothing to do with each other
    with_it = partners[node] | _fewest(_without(partners, partners[node] | {node}), rank)
    return with_it if _price(with_it, rank) < _price(without_it, rank) else without_it


def _price(out: set[str], rank: _Rank) -> tuple[int, int]:
    return len(out), sum(not rank[node][0] for node in out)


def _most_silent(partners: dict[str, set[str]], rank: _Rank) -> str:
    return max(partners, key=lambda node: (len(partners[node]), rank[node]))


def _without(partners: dict[str, set[str]], gone: set[str]) -> dict[str, set[str]]:
    rest = {node: others - gone for node, others in partners.items() if node not in gone}
    return {node: others for node, others in rest.items() if others}
