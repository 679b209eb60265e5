"""Which nodes do not hear each other, by what they say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpctrain.agent.decide import DecisionLimits, PeerView, alive
from hpctrain.base.net.vertex_cover import NodePair


class ReachabilityTracker:
    """Who hears whom, as one agent knows it, and since when not."""

    def __init__(self, me: str, nodes: Sequence[str], settings: DecisionLimits) -> None:
        self._me = me
        self._nodes = nodes
        self._settings = settings
        self.silent: dict[NodePair, float] = {}
        """The pairs that do not hear each other, and since when."""

    def unheard(self, now: float, peers: Sequence[PeerView]) -> tuple[int, ...]:
        """Places in node order of the nodes that are not heard from here."""
        heard = {peer.node for peer in peers if alive(now, peer, self._settings)} | {self._me}
        return tuple(place for place, node in enumerate(self._nodes) if node not in heard)

    def note(self, now: float, peers: Sequence[PeerView]) -> None:
        """Take in what the peers say now."""
        unheard = {
            peer.node: [self._nodes[place] for place in peer.unheard if place < len(self._nodes)]
            for peer in peers
            if alive(now, peer, self._settings)
        }
        self.silent = {pair: self.silent.get(pair, now) for pair in unreachable_pairs(self._me, self._nodes, unheard)}


def unreachable_pairs(me: str, nodes: Sequence[str], unheard: Mapping[str, Collection[str]]) -> set[NodePair]:
    """The pairs of nodes, in node order, of which one does not hear the other although somebody does.

    A node that nobody hears is lost, which is no matter of pairs. One that others hear may be at work.

    Args:
        me: the node that asks.
        nodes: all nodes, in order.
        unheard: of each other node that is heard here, the nodes that it says it does not hear.
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
