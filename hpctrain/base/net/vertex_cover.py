"""Finds the nodes to leave out when some pairs of nodes do not reach each other: a minimum vertex cover. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

NodePair = tuple[str, str]
"""Two nodes that do not reach each other, in either order."""

EXACT_MAX_NODES = 20
"""Number of nodes in unreachable pairs up to which the search is exact; with each further node, the exact search would
take 1.5 times as long. Above this number, a greedy search repeatedly leaves out the node that is in the most pairs."""


def vertex_cover(nodes: Sequence[str], pairs: Iterable[NodePair], first: Collection[str] = ()) -> list[str]:
    """Return the nodes to leave out, in the order of `nodes`, so that all others reach each other.

    The result is as small as possible, for up to EXACT_MAX_NODES nodes in pairs. With more, the node in the most pairs
    is left out, again and again, until no pair remains. Among equally small results, the search prefers to leave out
    nodes in `first`, then nodes in more pairs, then later nodes.

    Args:
        nodes: all nodes, in order.
        pairs: the pairs that do not reach each other; pairs with a node that is not in `nodes` are ignored.
        first: nodes that are preferably left out, such as nodes that are left out already.
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
"""Node -> whether it is in `first` of `vertex_cover`, and its index in `nodes`; of equal nodes, the one with the
highest value is left out."""


def _greedy_cover(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    out: set[str] = set()
    while partners:
        node = _highest_degree(partners, rank)
        out.add(node)
        partners = _without(partners, {node})
    return out


def _minimum_cover(partners: dict[str, set[str]], rank: _Rank) -> set[str]:
    """Return the smallest set of nodes that holds at least one node of each pair that does not reach each other. Among
    equally small sets it is the one with the most nodes in `first` of `vertex_cover`. The node with the most partners
    is in the set, or all of its partners are: both cases are tried by recursion.

    Args:
        partners: node -> the nodes that it does not reach.
        rank: which of equal nodes to prefer.
    """
    if not partners:
        return set()
    node = _highest_degree(partners, rank)
    without_it = {node} | _minimum_cover(_without(partners, {node}), rank)
    if len(partners[node]) == 1:
        return without_it  # the highest degree is one: only separate pairs remain
    with_it = partners[node] | _minimum_cover(_without(partners, partners[node] | {node}), rank)
    return with_it if _cover_cost(with_it, rank) < _cover_cost(without_it, rank) else without_it


def _cover_cost(out: set[str], rank: _Rank) -> tuple[int, int]:
    return len(out), sum(not rank[node][0] for node in out)


def _highest_degree(partners: dict[str, set[str]], rank: _Rank) -> str:
    return max(partners, key=lambda node: (len(partners[node]), rank[node]))


def _without(partners: dict[str, set[str]], gone: set[str]) -> dict[str, set[str]]:
    return {node: others - gone for node, others in partners.items() if node not in gone and others - gone}
