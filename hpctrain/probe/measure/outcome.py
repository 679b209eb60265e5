"""The raw measurements of a probe, from which the topology is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import AlphaBetaLine, PairFigures, Point, fit_lines
from hpctrain.records.format.document import Part
from hpctrain.records.topology.evidence import HostFacts
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.pair_matrix import PairMatrix

ALL_LINKS_MAX_NODES = 64
"""Most nodes with which all figures of all pairs are stored. With more nodes, only the main figures are stored, as
arrays (`PairMatrix`)."""
WHOLE_PAIRS_PER_NODE = 8
"""With more than `ALL_LINKS_MAX_NODES` nodes, all figures are stored only for the first n × this many pairs of n nodes.
These come from the first 16 rounds, which connect all nodes directly or over other nodes."""


Text = Annotated[str, Field(min_length=1, max_length=1024)]
MaybeEmpty = Annotated[str, Field(max_length=1024)] | None
Port = Annotated[int, Field(gt=0, lt=1 << 16)]


class JoinedNode(Part):
    """A node that joined the probe: address and port of its listener, its network interface, its host name, the
    switches that Slurm names for it, and facts about its system."""

    addr: Text
    """Address of the node's own listener."""
    port: Port
    iface: MaybeEmpty = None
    host: MaybeEmpty = None
    switches: MaybeEmpty = None
    """SLURM_TOPOLOGY_ADDR: the switches above the node and the node's name, joined by dots."""
    facts: HostFacts | None = None
    """Facts that the node's operating system reports, such as interfaces and MTU; None if the node sent none."""


@dataclass(frozen=True)
class PairResult:
    """The result of one measurement of the pair of nodes `a` and `b`, in a round in which `concurrency` pairs measured.
    `at_a` and `at_b` are the figures that each of the two measured. `alone` says whether the pair had the network to
    itself."""

    a: str
    b: str
    alone: bool
    """Whether few enough pairs measured at the same time that this pair had the network to itself."""
    concurrency: int
    """Number of pairs that measured in the same round."""
    at_a: PairFigures
    at_b: PairFigures

    def turned(self) -> PairResult:
        """Return the same measurement with `a` and `b` swapped."""
        return PairResult(self.b, self.a, self.alone, self.concurrency, self.at_b, self.at_a)

    def from_both_ends(self) -> tuple[PairResult, PairResult]:
        """Return the measurement with `a` as the first end, and the same measurement with `b` as the first end."""
        return self, self.turned()

    def seen_from(self, name: str) -> PairResult:
        """Return the same measurement with the node `name`, one of the two, as the first end."""
        return self if self.a == name else self.turned()


@dataclass(frozen=True)
class ContentionRound:
    """The results of a round that shows oversubscription. In it, clusters of one switch level measure with each other:
    one pair for each two clusters if `alone`, otherwise all members at once."""

    alone: bool
    results: tuple[PairResult, ...]


@dataclass
class ProbeOutcome:
    """All measurements of a probe so far, and the reasons for those that failed (`lost` nodes, `broken` links,
    `devices_failed`, `backend_failed`). The coordinator fills it."""

    nodes: list[str]
    joined: dict[str, JoinedNode] = field(default_factory=dict)
    """Node -> what the node reported when it joined."""
    lost: dict[str, str] = field(default_factory=dict)
    """Lost node -> what it did not answer, or why its connection closed."""
    pairs: list[PairResult] = field(default_factory=list)
    """All measured pairs, with up to `ALL_LINKS_MAX_NODES` nodes. Empty with more nodes; `matrix` then has their
    figures."""
    contention: list[ContentionRound] = field(default_factory=list)
    """The rounds that show oversubscription."""
    retests: list[PairResult] = field(default_factory=list)
    """Measurements of suspects with good partners, and of good pairs to compare with, in quiet rounds."""
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pair of living nodes that tried to measure and failed -> the reason."""
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    """Node -> the figures of its devices."""
    devices_failed: dict[str, str] = field(default_factory=dict)
    """Node whose devices were not measured -> the reason."""
    backend: dict[tuple[str, str], tuple[str, BackendFigures]] = field(default_factory=dict)
    """(sending node, receiving node) -> (name of the training backend, figures of messages over it)."""
    backend_failed: dict[str, str] = field(default_factory=dict)
    """Node or pair that failed to measure messages over the training backend -> the reason."""
    prior: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Node -> switches above the node in the prior, an earlier topology file; the highest first."""
    rounds_done: int = 0
    rounds_planned: int = 0
    wall_s: float = 0.0
    """Seconds since the probe began."""
    _first: list[PairResult] = field(default_factory=list)
    _matrix: PairMatrix | None = None

    @property
    def alive(self) -> list[str]:
        """Names of the nodes that were not lost, in the order of `nodes`."""
        return [name for name in self.nodes if name not in self.lost]

    def add(self, results: Sequence[PairResult], bulk_bytes: int) -> None:
        """Store the results of a round of pairs.

        Args:
            bulk_bytes: least bytes, in each direction, of the transfer that measured the bandwidth; alpha and beta are
                fitted with the time of a message of this size, too.
        """
        if len(self.nodes) <= ALL_LINKS_MAX_NODES:
            self.pairs += results
            return
        if self._matrix is None:
            self._matrix = PairMatrix(self.nodes)
        if len(self._first) < WHOLE_PAIRS_PER_NODE * len(self.nodes):
            self._first += results
        for result in results:
            _enter(self._matrix, result)
        _enter_lines(self._matrix, results, bulk_bytes)

    def unmeasured(self) -> list[tuple[str, str]]:
        """Return the names of each pair of living nodes that tried to measure and failed each time. Pairs, and the two
        names of a pair, are in the order of `nodes`."""
        matrix, order = self.matrix(), {name: place for place, name in enumerate(self.nodes)}
        there = {
            (a, b) if order[a] < order[b] else (b, a)
            for a, b in self.broken
            if not {a, b} & self.lost.keys() and not matrix.measured[order[a], order[b]]
        }
        return sorted(there, key=lambda pair: (order[pair[0]], order[pair[1]]))

    @property
    def whole_pairs(self) -> list[PairResult]:
        """Pairs with all their figures. Above `ALL_LINKS_MAX_NODES` nodes these are only the pairs of the first rounds,
        which suffice for clock offsets and interfaces."""
        return self.pairs or self._first

    def matrix(self) -> PairMatrix:
        """Return bandwidths and latencies of all pairs that were measured so far, as arrays [source, target]."""
        if self._matrix is not None:
            return self._matrix
        made = PairMatrix(self.nodes)
        for result in self.pairs:
            _enter(made, result)
        return made


def _enter(matrix: PairMatrix, result: PairResult) -> None:
    """Write a pair's figures into both of its cells [sender, receiver]: latency as the sender measured it, bandwidth as
    the receiver measured it."""
    for seen in result.from_both_ends():
        cell, latency = (matrix.index[seen.a], matrix.index[seen.b]), seen.at_a.latency
        matrix["isolated_bytes_per_s" if seen.alone else "bytes_per_s"][cell] = seen.at_b.bytes_per_s
        matrix["latency_min_s"][cell] = latency.min
        matrix["latency_p50_s"][cell] = latency.p50
        matrix["latency_p95_s"][cell] = latency.p95


def _enter_lines(matrix: PairMatrix, results: Sequence[PairResult], bulk_bytes: int) -> None:
    """Write alpha and beta of pairs with a size sweep into the matrix. For other pairs, readers of the matrix derive
    them from latency and bandwidth.

    Args:
        bulk_bytes: least bytes of the transfer that measured the bandwidth, in each direction.
    """
    swept = [seen for result in results for seen in result.from_both_ends() if seen.at_a.ladder]
    for seen, line in zip(swept, pair_lines(swept, bulk_bytes), strict=True):
        cell = matrix.index[seen.a], matrix.index[seen.b]
        matrix["alpha_s"][cell], matrix["beta_s_per_byte"][cell] = line.alpha_s, line.beta_s_per_byte


def pair_lines(pairs: Sequence[PairResult], bulk_bytes: int) -> list[AlphaBetaLine]:
    """Return for each pair the line t = alpha + beta·bytes of messages from its first end to its second, fitted to
    pings, size sweep and transfer.

    Args:
        bulk_bytes: least bytes of the transfer that measured the bandwidth, in each direction.
    """
    return fit_lines([_points(pair.at_a, pair.at_b, bulk_bytes) for pair in pairs])


def _points(sender: PairFigures, receiver: PairFigures, bulk_bytes: int) -> list[Point]:
    """Return points (bytes, seconds) of messages from sender to receiver: of the ping, of the size sweep, and of the
    transfer at `bulk_bytes` and at twice that.

    A ping counts as 0 bytes. Its 8 bytes are small beside the packet headers, and counting them would make alpha
    negative on a slow link.
    """
    start_up_s, rate = sender.latency.p50, receiver.bytes_per_s
    streamed = [(float(size), start_up_s + size / rate) for size in (bulk_bytes, 2 * bulk_bytes)]
    return [(0.0, start_up_s), *sender.ladder, *streamed]
