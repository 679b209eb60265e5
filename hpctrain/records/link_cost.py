"""How long a message takes between two devices, from what a topology says of their link."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hpctrain.records.topology import Topology

INTRA_NODE_LATENCY_S = 5e-6
"""Start-up cost assumed between two devices of one node when it was not measured: a kernel launch on each side."""


class LinkCost:
    """Time of a message between two devices, t = alpha + beta·bytes: from the link, else the matrix, else the slowest
    class."""

    def __init__(self, topology: Topology) -> None:
        self._pairs = topology.pairs
        self._costs: dict[tuple[str, str], tuple[float, float]] = {}
        classes = {entry.id: (entry.alpha_s, entry.beta_s_per_byte) for entry in topology.fabric.classes}
        for link in topology.fabric.links:
            for ends, figures in (((link.a, link.b), link.ab), ((link.b, link.a), link.ba)):
                if figures.alpha_s is not None and figures.beta_s_per_byte is not None:
                    self._costs[ends] = (figures.alpha_s, figures.beta_s_per_byte)
                elif link.class_ in classes:
                    self._costs[ends] = classes[link.class_]
        known = list(classes.values()) or list(self._costs.values())
        self._levels = {entry.level: (entry.alpha_s, entry.beta_s_per_byte) for entry in topology.fabric.classes}
        self._clusters: dict[str, list[tuple[int, str]]] = {}
        for cluster in sorted(topology.fabric.clusters, key=lambda cluster: cluster.level):
            for member in cluster.members:
                self._clusters.setdefault(member, []).append((cluster.level, cluster.id))
        # The slowest class stands in for a pair nobody measured: a plan should not lean on an unknown link.
        self._default = max(known, key=lambda cost: cost[1]) if known else None
        speeds = [d.memory_bytes_per_s for n in topology.nodes for d in n.devices if d.memory_bytes_per_s]
        self._intra = (INTRA_NODE_LATENCY_S, 1.0 / min(speeds)) if speeds else (INTRA_NODE_LATENCY_S, 0.0)
        self._within = {
            node.id: (INTRA_NODE_LATENCY_S, 1.0 / node.intra_bytes_per_s)
            for node in topology.nodes
            if node.intra_bytes_per_s
        }

    def between(self, source: str, target: str) -> tuple[float, float]:
        """(alpha in seconds, beta in seconds per byte) from device `source` to device `target`, as 'node:device'.

        Raises:
            KeyError: the file has neither that link nor a class.
        """
        a, b = source.partition(":")[0], target.partition(":")[0]
        if a == b:
            return self._within.get(a, self._intra)
        cost = self._costs.get((a, b))
        if cost is None and self._pairs is not None:
            cost = self._pairs.cost(a, b)
        cost = cost or self._of_class(a, b) or self._default
        if cost is None:
            raise KeyError(f"{a}-{b}")
        return cost

    def _of_class(self, a: str, b: str) -> tuple[float, float] | None:
        """What pairs have whose lowest common cluster is as high as that of this one."""
        shared = set(self._clusters.get(a, ())) & set(self._clusters.get(b, ()))
        return self._levels.get(min((level for level, _ in shared), default=0))

    def seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Time of one message of `size_bytes`."""
        alpha, beta = self.between(source, target)
        return alpha + beta * size_bytes

    def worst(self, places: Iterable[str]) -> tuple[float, float]:
        """The slowest alpha and beta among the devices, as a ring through them would meet."""
        pairs = [self.between(a, b) for a, b in itertools.permutations(places, 2)]
        if not pairs:
            return (0.0, 0.0)
        return (max(alpha for alpha, _ in pairs), max(beta for _, beta in pairs))
