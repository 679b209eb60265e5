"""Time of a message between two nodes, from the figures in a topology."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Topology

INTRA_NODE_LATENCY_S = 5e-6
"""Assumed alpha of a message between two devices of one node if it was not measured: a kernel launch on each side."""
INTRA_NODE_BYTES_PER_S = 1e10
"""Assumed bandwidth of messages between two devices of one node if neither this bandwidth nor the memory bandwidth of
any device was measured."""

Cost = tuple[float, float]
"""(alpha in seconds, beta in seconds per byte) of a message: time = alpha + beta × bytes."""


class LinkCost:
    """Times of messages between the nodes of a topology, as alpha and beta of time = alpha + beta × bytes. The figures
    of a pair are those of its link, else of the pair matrix, else of its link class, else of the slowest link class.
    Without link classes, a pair without figures is unknown.

    A run's messages go over its training backend. If the backend was measured for only some pairs of a link class, the
    TCP figures of the other pairs are multiplied by the class's ratio of backend to TCP, so that all figures are
    comparable.
    """

    def __init__(self, topology: Topology) -> None:
        self._pairs = topology.pairs
        self._matrix = None if self._pairs is None else self._pairs.costs()
        self._costs: dict[tuple[str, str], Cost] = {}
        classes = {entry.id: entry for entry in topology.fabric.classes}
        for link in topology.fabric.links:
            usual = classes.get(link.class_ or "")
            for ends, figures in link.directions():
                cost = figures.cost()
                if cost is not None:
                    self._costs[ends] = cost if figures.backend else _over_backend(cost, usual)
                elif usual is not None:
                    self._costs[ends] = usual.cost()
        known = [entry.cost() for entry in classes.values()]
        self._levels = {entry.level: entry for entry in topology.fabric.classes}
        self._clusters: dict[str, list[tuple[int, str]]] = {}
        for cluster in sorted(topology.fabric.clusters, key=lambda cluster: cluster.level):
            for member in cluster.members:
                self._clusters.setdefault(member, []).append((cluster.level, cluster.id))
        # A pair without any figure gets the slowest class: a plan should not rely on an unknown link. Without classes
        # such a pair stays unknown: nobody knows whether its nodes reach each other at all.
        self._default = max(known, key=lambda cost: cost[1]) if known else None
        speeds = [d.memory_bytes_per_s for n in topology.nodes for d in n.devices if d.memory_bytes_per_s]
        self._intra = (INTRA_NODE_LATENCY_S, 1.0 / min(speeds, default=INTRA_NODE_BYTES_PER_S))
        self._within = {
            node.id: (node.intra_alpha_s or INTRA_NODE_LATENCY_S, 1.0 / node.intra_bytes_per_s)
            for node in topology.nodes
            if node.intra_bytes_per_s
        }

    def unknown_pairs(self, nodes: Sequence[str]) -> list[tuple[str, str]]:
        """Return the pairs of `nodes` for which the topology has, in one of the two directions, neither figures nor a
        link class."""
        if self._default is not None:
            return []
        return [(a, b) for a, b in combinations(nodes, 2) if self.find(a, b) is None or self.find(b, a) is None]

    def between(self, a: str, b: str) -> Cost:
        """Return (alpha in seconds, beta in seconds per byte) of messages from node `a` to node `b`. If `a` is `b`,
        they are messages between two devices of the node.

        Raises:
            KeyError: the topology has no figures of the link and no link class.
        """
        cost = self.find(a, b)
        if cost is None:
            raise KeyError(f"{a}-{b}")
        return cost

    def find(self, a: str, b: str) -> Cost | None:
        """Return (alpha in seconds, beta in seconds per byte) of messages from node `a` to node `b`; None if the
        topology has no figures of the link and no link class."""
        if a == b:
            return self._within.get(a, self._intra)
        return self._costs.get((a, b)) or self._of_matrix(a, b) or self._of_class(a, b) or self._default

    def _of_matrix(self, a: str, b: str) -> Cost | None:
        if self._pairs is None or self._matrix is None:
            return None
        row, column = self._pairs.index[a], self._pairs.index[b]
        alpha, beta = (float(array[row, column]) for array in self._matrix)
        return None if math.isnan(alpha) or math.isnan(beta) else _over_backend((alpha, beta), self._class(a, b))

    def _of_class(self, a: str, b: str) -> Cost | None:
        entry = self._class(a, b)
        return None if entry is None or entry.level is None else entry.cost()

    def _class(self, a: str, b: str) -> LinkClass | None:
        """Return the link class for the level of the lowest cluster that contains both nodes, else the class of all
        pairs, else None."""
        shared = set(self._clusters.get(a, ())) & set(self._clusters.get(b, ()))
        return self._levels.get(min((level for level, _ in shared), default=0)) or self._levels.get(None)

    def least(self) -> Cost:
        """Return (smallest alpha in seconds, smallest beta in seconds per byte) over all pairs of nodes; alpha and beta
        may be those of different pairs. (0, 0) if the topology has no figures of links.
        """
        known = [*self._costs.values(), *self._least_of_matrix()]
        known += [entry.cost() for entry in self._levels.values() if entry.level is not None]
        known += [] if self._default is None else [self._default]
        return min((alpha for alpha, _ in known), default=0.0), min((beta for _, beta in known), default=0.0)

    def _least_of_matrix(self) -> list[Cost]:
        """Return (smallest alpha, smallest beta) of the pairs in the pair matrix, once for each level of clusters, in s
        and s/byte, as estimated for messages over the training backend; [] without a pair matrix."""
        if self._pairs is None or self._matrix is None:
            return []
        import numpy as np  # only for large clusters, as the matrix itself

        levels = np.zeros((len(self._pairs.nodes),) * 2, dtype=int)
        members: dict[tuple[int, str], list[int]] = {}
        for node, clusters in self._clusters.items():
            for cluster in clusters:
                members.setdefault(cluster, []).append(self._pairs.index[node])
        for (level, _), rows in sorted(members.items(), reverse=True):
            levels[np.ix_(rows, rows)] = level  # the lowest shared level is written last
        alpha, beta = self._matrix
        measured = ~(np.isnan(alpha) | np.isnan(beta) | np.eye(len(levels), dtype=bool))
        costs = []
        for level in np.unique(levels[measured]).tolist():
            pairs = measured & (levels == level)
            least = float(alpha[pairs].min()), float(beta[pairs].min())
            costs.append(_over_backend(least, self._levels.get(level) or self._levels.get(None)))
        return costs


def _over_backend(cost: Cost, usual: LinkClass | None) -> Cost:
    """Return the estimated (alpha in seconds, beta in seconds per byte) of messages over the training backend, for a
    pair that was measured over TCP only.

    Args:
        cost: the pair's alpha and beta over TCP, which are multiplied by the ratio of backend to TCP in its link class.
        usual: the pair's link class; None: it has none, and `cost` is returned unchanged.
    """
    if usual is None:
        return cost
    (alpha, beta), over = (usual.alpha_s, usual.beta_s_per_byte), usual.cost()
    return cost[0] * (over[0] / alpha if alpha > 0 else 1.0), cost[1] * (over[1] / beta if beta > 0 else 1.0)
