"""A simulated fat tree: what pairs of nodes would measure at the same time, with different rates, faults, noise and
bursts of foreign traffic.

Rates are max-min fair over the nodes' ports and the uplinks of each switch, which count as one pipe (adaptive
routing). Latency is that of the highest switch crossed, times a factor of the slower node. Times are seconds, rates
bytes/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]


@dataclass(frozen=True)
class FabricSpec:
    """Size, speed, latency, oversubscription and noise of the fabric."""

    nodes: int
    per_leaf: int = 32
    """Nodes below one leaf switch."""
    leaves_per_pod: int | None = None
    """Leaf switches below one spine, which form a pod; None: all of them, so there are two levels of latency."""
    bytes_per_s: float = 25e9 / 8
    """Bandwidth of a node's port in each direction."""
    latency_s: float = 8e-6
    """One-way latency below one leaf switch."""
    hop_gap: float = 0.25
    """Share of `latency_s` that each further switch level adds."""
    oversubscription: tuple[float, ...] = (1.0, 1.0)
    """Oversubscription of the leaves' uplinks, and of the spines' uplinks, each relative to the level below."""
    noise: float = 0.03
    """Standard deviation of a measured bandwidth, and of a single round trip, as a share of its value."""
    bursts: float = 0.0
    """Share of the measurements in which foreign traffic takes some of the bandwidth."""


@dataclass(frozen=True)
class FabricFaults:
    """Faults of the fabric, by number of the node; a factor of 1 is healthy."""

    sends: dict[int, float] = field(default_factory=dict)
    """Node -> share of its port's bandwidth at which it sends."""
    receives: dict[int, float] = field(default_factory=dict)
    """Node -> share of its port's bandwidth at which it receives."""
    latency: dict[int, float] = field(default_factory=dict)
    """Node -> factor on the latency of all its pairs."""
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    """Pair of nodes -> share of a port's bandwidth that their link reaches, in each direction."""


@dataclass(frozen=True)
class Measured:
    """What the K pairs of a round measured; arrays with K rows."""

    there_bytes_per_s: Floats
    """Bandwidth from the first to the second node of each pair."""
    back_bytes_per_s: Floats
    """Bandwidth from the second to the first node of each pair."""
    latency_s: Floats
    """[K, 2, 3]: as measured by the first and by the second node, the smallest, the median and the 95th percentile."""


class SimulatedFabric:
    """A fabric with its faults. The same seed gives the same figures for the same rounds in the same order. `pings` are
    the round trips from which each node of a pair takes its latency."""

    def __init__(self, spec: FabricSpec, faults: FabricFaults | None = None, seed: int = 0, pings: int = 50) -> None:
        self.spec = spec
        self._faults = faults or FabricFaults()
        self._rng = np.random.default_rng(seed)
        self._pings = pings
        self.leaf: Ints = np.arange(spec.nodes) // spec.per_leaf
        self.pod: Ints = self.leaf // (spec.leaves_per_pod or max(1, int(self.leaf.max()) + 1))
        self._sends, self._receives = _per_node(self._faults.sends, spec), _per_node(self._faults.receives, spec)
        self._slow = _per_node(self._faults.latency, spec)
        self._capacity = self._capacities()

    def measure(self, pairs: Sequence[tuple[int, int]]) -> Measured:
        """Return the figures of pairs that measure at the same time: first all send there, then all send back."""
        ends = np.array(pairs, dtype=np.int_)
        a, b = ends[:, 0], ends[:, 1]
        return Measured(self._noisy(self._rates(a, b)), self._noisy(self._rates(b, a)), self._latencies(a, b))

    def base_latency(self, a: Ints, b: Ints) -> Floats:
        """Return the one-way latency in seconds between the nodes `a[i]` and `b[i]`, for each i, without noise."""
        hops = (self.leaf[a] != self.leaf[b]).astype(float) + (self.pod[a] != self.pod[b])
        return self.spec.latency_s * (1 + self.spec.hop_gap * hops) * np.maximum(self._slow[a], self._slow[b])

    def _capacities(self) -> Floats:
        """Return the capacity of every resource in bytes/s, one after the other: all ports out, ports in, uplinks of
        leaves, downlinks of leaves, uplinks of pods, downlinks of pods."""
        spec, rate = self.spec, self.spec.bytes_per_s
        per_leaf = np.bincount(self.leaf) * rate / spec.oversubscription[0]
        per_pod = np.bincount(self.pod) * rate / np.prod(spec.oversubscription)
        return np.concatenate([rate * self._sends, rate * self._receives, per_leaf, per_leaf, per_pod, per_pod])

    def _rates(self, source: Ints, target: Ints) -> Floats:
        """Return the max-min fair rates in bytes/s of the flows from `source[i]` to `target[i]`, which run at the
        same time."""
        n, leaves, pods = self.spec.nodes, int(self.leaf.max()) + 1, int(self.pod.max()) + 1
        none = -1
        leaves_left = self.leaf[source] != self.leaf[target]
        pods_left = self.pod[source] != self.pod[target]
        path = np.stack(
            [
                source,
                n + target,
                np.where(leaves_left, 2 * n + self.leaf[source], none),
                np.where(leaves_left, 2 * n + leaves + self.leaf[target], none),
                np.where(pods_left, 2 * n + 2 * leaves + self.pod[source], none),
                np.where(pods_left, 2 * n + 2 * leaves + pods + self.pod[target], none),
            ],
            axis=1,
        )
        return _max_min(path, self._capacity, self._limits(source, target))

    def _limits(self, source: Ints, target: Ints) -> Floats:
        """Return the rate limit of each flow in bytes/s: below infinity only where the pair's link has a fault."""
        limits = np.full(len(source), np.inf)
        for (a, b), share in self._faults.links.items():
            hit = ((source == a) & (target == b)) | ((source == b) & (target == a))
            limits[hit] = share * self.spec.bytes_per_s
        return limits

    def _noisy(self, rates: Floats) -> Floats:
        noise = np.clip(1 + self.spec.noise * self._rng.standard_normal(len(rates)), 0.2, 1.8)
        hit = self._rng.random(len(rates)) < self.spec.bursts
        noise[hit] *= self._rng.uniform(0.4, 0.9, int(hit.sum()))
        return rates * noise

    def _latencies(self, a: Ints, b: Ints) -> Floats:
        """Return the simulated latencies of the pairs in seconds, of shape [K, 2, 3]: for both nodes of a pair the
        minimum, the median and the 95th percentile."""
        base = self.base_latency(a, b)
        trips = np.abs(1 + self.spec.noise * self._rng.standard_normal((len(a), 2, self._pings)))
        hit = self._rng.random(len(a)) < self.spec.bursts
        # A burst of foreign traffic delays a part of the round trips of its slot.
        held_up = self._rng.random(trips.shape) < 0.3
        trips[hit] *= np.where(held_up[hit], self._rng.uniform(1.2, 3.0, trips[hit].shape), 1.0)
        trips.sort(axis=2)
        last = self._pings - 1
        picked: Floats = trips[:, :, [0, round(0.5 * last), round(0.95 * last)]] * base[:, None, None]
        return picked


def _max_min(path: Ints, capacity: Floats, limits: Floats) -> Floats:
    """Return the max-min fair rates of flows over resources, by progressive filling: all resources that are a
    bottleneck in a step are filled at once.

    Args:
        path: [flow, hop], the resources that each flow uses; -1 for none.
        capacity: of each resource.
        limits: rate limit of each flow.
    """
    rates = np.zeros(len(path))
    remaining = np.append(capacity, np.inf)  # the last one is resource -1
    open_flows = np.ones(len(path), dtype=bool)
    while open_flows.any():
        some = path[open_flows]
        count = np.bincount(some.ravel() % len(remaining), minlength=len(remaining))
        share = remaining / np.maximum(count, 1)
        wanted = np.minimum(share[some].min(axis=1), limits[open_flows])
        least = np.full(len(remaining), np.inf)
        np.minimum.at(least, some.ravel(), np.repeat(wanted, some.shape[1]))
        # A resource that every one of its flows wants only its share of is a bottleneck, so these flows are done. A
        # flow at its own limit is done too.
        full = least >= share * (1 - 1e-9)
        held = (full[some] & (wanted[:, None] >= share[some] * (1 - 1e-9))).any(axis=1)
        done = held | (wanted >= limits[open_flows])
        chosen = np.flatnonzero(open_flows)[done]
        rates[chosen] = wanted[done]
        np.subtract.at(remaining, path[chosen].ravel(), np.repeat(wanted[done], path.shape[1]))
        remaining = np.maximum(remaining, 0.0)
        remaining[-1] = np.inf
        open_flows[chosen] = False
    return rates


def _per_node(factors: dict[int, float], spec: FabricSpec) -> Floats:
    made = np.ones(spec.nodes)
    for node, factor in factors.items():
        made[node] = factor
    return made
