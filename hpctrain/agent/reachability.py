"""Tracks which nodes do not hear each other, according to their heartbeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpctrain.agent.decide import DecisionLimits, PeerView, alive
from hpctrain.base.net.vertex_cover import NodePair


class ReachabilityTracker:
    """The pairs of nodes that do not hear each other, as one agent knows them, and since when."""

    def __init__(self, me: str, nodes: Sequence[str], limits: DecisionLimits) -> None:
        self._me = me
        self._nodes = nodes
        self._limits = limits
        self.silent: dict[NodePair, float] = {}
        """Pair of nodes that do not hear each other -> since when."""

    def unheard(self, now: float, peers: Sequence[PeerView]) -> tuple[int, ...]:
        """Return the indices in node order of the nodes that this agent does not hear."""
        heard = {peer.node for peer in peers if alive(now, peer, self._limits)} | {self._me}
        return tuple(place for place, node in enumerate(self._nodes) if node not in heard)

    def note(self, now: float, peers: Sequence[PeerView]) -> None:
        """Update `silent` from the peers' last heartbeats."""
        unheard = {
            peer.node: [self._nodes[place] for place in peer.unheard if place < len(self._nodes)]
            for peer in peers
            if alive(now, peer, self._limits)
        }
        self.silent = {pair: self.silent.get(pair, now) for pair in unreachable_pairs(self._me, self._nodes, unheard)}


def unreachable_pairs(me: str, nodes: Sequence[str], unheard: Mapping[str, Collection[str]]) -> set[NodePair]:
    """Return the pairs of nodes, in node order, of which one does not hear the other although some node does.

    A node that no node hears is lost, and in no pair. A node that others hear may be at work.

    Args:
        me: this agent's node.
        nodes: all nodes, in order.
        unheard: other node that this agent hears -> the nodes that it reports not to hear.
    """
    by_node = {me: [node for node in nodes if node != me and node not in unheard], **unheard}
    lost = set.intersection(*map(set, by_node.values()))
    place = {node: number for number, node in enumerate(nodes)}
    return {
        (node, other) if place[node] < place[other] else (other, node)
        for node, others in by_node.items()
        for other in others
        if other not in lost and other != node
    }
