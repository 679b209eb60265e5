"""What a probe brought back, before it becomes a topology: plain data, so that the rest is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.pair_line import fit_pair_lines
from hpctrain.records.topology.evidence import HostFacts
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.pair_matrix import PairMatrix

ALL_LINKS_MAX_NODES = 64
"""Up to this many nodes every figure of every pair is kept; above, the matrix of the main ones."""
WHOLE_PAIRS_PER_NODE = 8
"""Pairs of the first rounds that are kept whole above that, for each node: 16 rounds join all nodes with each other."""


@dataclass(frozen=True)
class JoinedNode:
    """A node that joined: where it is reached and what its machine is called."""

    addr: str
    port: int
    iface: str | None
    host: str | None
    switches: str | None = None
    """SLURM_TOPOLOGY_ADDR: the switches above it and its name, joined by dots."""
    facts: HostFacts | None = None
    """What its system says."""


@dataclass(frozen=True)
class PairResult:
    """One pair, measured once."""

    a: str
    b: str
    alone: bool
    """True when it had the network to itself."""
    concurrency: int
    """Pairs at work in that round."""
    at_a: PairFigures
    at_b: PairFigures

    def turned(self) -> PairResult:
        """The same, seen from the other end."""
        return PairResult(self.b, self.a, self.alone, self.concurrency, self.at_b, self.at_a)


@dataclass(frozen=True)
class ContentionRound:
    """A round of pairs between clusters of one level: one pair for each two clusters, or all members at once."""

    alone: bool
    results: tuple[PairResult, ...]


@dataclass
class ProbeOutcome:
    """Everything that was measured, and what was not with its reason. Filled by the coordinator."""

    nodes: list[str]
    joined: dict[str, JoinedNode] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer, with when."""
    pairs: list[PairResult] = field(default_factory=list)
    """Every pair that was measured, up to ALL_LINKS_MAX_NODES nodes; above, `matrix` has their figures."""
    contention: list[ContentionRound] = field(default_factory=list)
    retests: list[PairResult] = field(default_factory=list)
    """Suspects with good partners, and good pairs to compare with, in quiet rounds."""
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of living nodes that could not measure, with the reason."""
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    devices_failed: dict[str, str] = field(default_factory=dict)
    backend: dict[tuple[str, str], tuple[str, BackendFigures]] = field(default_factory=dict)
    """(sender, receiver) -> the training backend and what messages over it take."""
    backend_failed: dict[str, str] = field(default_factory=dict)
    """Nodes whose part in those messages failed, with the reason."""
    prior: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Node -> switches above it, the highest first, as an earlier file has them."""
    rounds_done: int = 0
    rounds_planned: int = 0
    wall_s: float = 0.0
    _first: list[PairResult] = field(default_factory=list)
    _matrix: PairMatrix | None = None

    @property
    def alive(self) -> list[str]:
        """Nodes that were not lost, in order."""
        return [name for name in self.nodes if name not in self.lost]

    def add(self, results: Sequence[PairResult], bulk_bytes: int) -> None:
        """Keep the figures of pairs.

        Args:
            bulk_bytes: volume of their transfers.
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
        """Pairs of living nodes that tried and never could, in node order."""
        matrix, order = self.matrix(), {name: place for place, name in enumerate(self.nodes)}
        there = {
            (a, b) if order[a] < order[b] else (b, a)
            for a, b in self.broken
            if not {a, b} & self.lost.keys() and not matrix.measured[order[a], order[b]]
        }
        return sorted(there, key=lambda pair: (order[pair[0]], order[pair[1]]))

    @property
    def whole_pairs(self) -> list[PairResult]:
        """Pairs with everything that was said of them: all, or above ALL_LINKS_MAX_NODES nodes those of the first
        rounds, which are enough to tell of nodes rather than of pairs."""
        return self.pairs or self._first

    def matrix(self) -> PairMatrix:
        """The main figures of all pairs so far."""
        if self._matrix is not None:
            return self._matrix
        made = PairMatrix(self.nodes)
        for result in self.pairs:
            _enter(made, result)
        return made


def _enter(matrix: PairMatrix, result: PairResult) -> None:
    """Latency belongs to who started the round trips, bandwidth to who received."""
    a, b = matrix.index[result.a], matrix.index[result.b]
    rate = matrix["isolated_bytes_per_s" if result.alone else "bytes_per_s"]
    rate[a, b], rate[b, a] = result.at_b.bytes_per_s, result.at_a.bytes_per_s
    for source, target, latency in ((a, b, result.at_a.latency), (b, a, result.at_b.latency)):
        matrix["latency_min_s"][source, target] = latency.min
        matrix["latency_p50_s"][source, target] = latency.p50
        matrix["latency_p95_s"][source, target] = latency.p95


def _enter_lines(matrix: PairMatrix, results: Sequence[PairResult], bulk_bytes: int) -> None:
    """What the planner takes, for pairs that measured single messages; for others it follows from the main figures."""
    directions = [
        (matrix.index[source], matrix.index[target], sender, receiver)
        for result in results
        for source, target, sender, receiver in (
            (result.a, result.b, result.at_a, result.at_b),
            (result.b, result.a, result.at_b, result.at_a),
        )
        if sender.ladder
    ]
    for (row, column, *_), line in zip(
        directions, fit_pair_lines([direction[2:] for direction in directions], bulk_bytes), strict=True
    ):
        matrix["alpha_s"][row, column], matrix["beta_s_per_byte"][row, column] = line.alpha_s, line.beta_s_per_byte
