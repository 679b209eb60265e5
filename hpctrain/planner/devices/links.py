"""Seconds of messages and all-reduces between devices, from the alpha and beta of the links that they cross."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from hpctrain.base.errors import InputError
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.link_cost import LinkCost


class Links:
    """Looks up alpha and beta between devices, and multiplies them by a factor.

    Args:
        costs: alpha and beta of each pair of nodes.
        factor: factor on every alpha and beta, which a profile of measured steps gives.
    """

    def __init__(self, costs: LinkCost, factor: float = 1.0) -> None:
        self._costs = costs
        self._factor = factor
        self._known: dict[tuple[DeviceId, DeviceId], tuple[float, float]] = {}

    def between(self, source: DeviceId, target: DeviceId) -> tuple[float, float]:
        """Return (alpha in seconds, beta in seconds per byte) between two devices.

        Raises:
            InputError: the topology says nothing about the pair.
        """
        cost = self._known.get((source, target))
        if cost is None:
            try:
                cost = self._costs.between(source.node, target.node)
            except KeyError:
                pair = " and ".join(sorted({source.node, target.node}))
                raise InputError(
                    f"topology: fabric.links: no alpha_s and beta_s_per_byte between {pair}; run `hpctrain probe` again"
                ) from None
            cost = (cost[0] * self._factor, cost[1] * self._factor)
            self._known[source, target] = cost
        return cost

    def least(self) -> tuple[float, float]:
        """Return the smallest alpha in seconds and the smallest beta in seconds per byte over all pairs of nodes; the
        alpha and the beta may be those of different pairs.
        """
        alpha, beta = self._costs.least()
        return alpha * self._factor, beta * self._factor


def message_s(links: Links, sources: Sequence[DeviceId], targets: Sequence[DeviceId], size_bytes: float) -> float:
    """Return the seconds until every source has sent `size_bytes` to its target, if all start together.

    Messages that leave a node together share its bandwidth.

    Args:
        targets: the target of each source, in the order of `sources`.

    Raises:
        InputError: the topology says nothing about a link.
    """
    alpha, beta = message_alpha_beta(links, sources, targets)
    return alpha + beta * size_bytes


def message_alpha_beta(links: Links, sources: Sequence[DeviceId], targets: Sequence[DeviceId]) -> tuple[float, float]:
    """Return (alpha in seconds, beta in seconds per byte) of simultaneous messages from every source to its target.

    If each message has `size` bytes, the slowest one has arrived after `alpha + beta * size` seconds. Messages that
    leave a node together share its bandwidth, which makes beta larger.

    Args:
        targets: the target of each source, in the order of `sources`.

    Raises:
        InputError: the topology says nothing about a link.
    """
    if len(sources) == 1:
        return links.between(sources[0], targets[0])
    pairs = list(zip(sources, targets, strict=True))
    if len(ends := {(source.node, target.node) for source, target in pairs}) == 1:
        # The usual case: all sources are on one node, and all targets are on one node.
        ((one, other),) = ends
        alpha, beta = links.between(sources[0], targets[0])
        return alpha, beta * (len(pairs) if one != other else 1)
    leaving = [source.node for source, target in pairs if source.node != target.node]
    sharing = max((leaving.count(node) for node in leaving), default=1)
    costs = [links.between(source, target) for source, target in pairs]
    return max(alpha for alpha, _ in costs), max(beta for _, beta in costs) * sharing


def ring_all_reduce_s(
    links: Links, device_ids: Sequence[DeviceId], size_bytes: float, hop_s: float = 0.0, by_node: bool = False
) -> float:
    """Return the seconds of a ring all-reduce: 2(n−1)(alpha + size/n·beta) for n devices, by the slowest link of the
    ring.

    Args:
        hop_s: seconds added to each hop's alpha.
        by_node: use rings within each node and then between nodes, if nodes have equally many of the devices and these
            rings are faster than one ring. NCCL's trees take about as long; they cross the network less often.

    Raises:
        InputError: the topology says nothing about a link.
    """
    n = len(device_ids)
    if n == 1:
        return 0.0
    alpha, beta, alpha_within, beta_within = 0.0, 0.0, 0.0, 0.0
    for source, target in ring_hops(device_ids):
        a, b = links.between(source, target)
        alpha, beta = max(alpha, a), max(beta, b)
        if source.node == target.node:
            alpha_within, beta_within = max(alpha_within, a), max(beta_within, b)
    ring = 2 * (n - 1) * (alpha + hop_s + beta * size_bytes / n)
    counts = Counter(device_id.node for device_id in device_ids)
    if not by_node or len(set(counts.values())) > 1 or len(counts) in (1, n):
        return ring
    nodes, per_node = len(counts), n // len(counts)
    inside = 2 * (per_node - 1) * (alpha_within + hop_s + beta_within * size_bytes / per_node)
    # All network cards of a node together are as fast as the link to another node, however many of the node's devices
    # send.
    outside = 2 * (nodes - 1) * (alpha + hop_s + beta * size_bytes / nodes)
    return min(ring, inside + outside)


def scalar_all_reduce_s(alpha: float, devices: int) -> float:
    """Return the seconds of the all-reduce of one number over n devices: 2·⌈log2(n)⌉ messages, each of which takes
    alpha.

    Args:
        alpha: seconds of a message of size 0.
    """
    return 2 * math.ceil(math.log2(devices)) * alpha


def rings_crossing_nodes(rings: Sequence[Sequence[DeviceId]]) -> dict[str, int]:
    """Return node -> number of rings with a hop that leaves the node; nodes that no ring leaves are absent."""
    count: dict[str, int] = {}
    for ring in rings:
        for node in {a.node for a, b in ring_hops(ring) if a.node != b.node}:
            count[node] = count.get(node, 0) + 1
    return count


def ring_hops(device_ids: Sequence[DeviceId]) -> list[tuple[DeviceId, DeviceId]]:
    """Return the (source, target) pairs of a ring: each device sends to the next one, and the last one to the first."""
    return list(zip(device_ids, [*device_ids[1:], *device_ids[:1]], strict=True))
