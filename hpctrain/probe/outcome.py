"""What a probe brought back, before it becomes a topology: plain data, so that the rest is pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.probe.devices import DeviceReport
from hpctrain.probe.figures import PairFigures
from hpctrain.records.evidence import HostFacts
from hpctrain.records.topology import BackendFigures


@dataclass(frozen=True)
class Joined:
    """A node that joined: where it is reached and what its machine is called."""

    addr: str
    port: int
    iface: str | None
    host: str | None
    facts: HostFacts | None = None


@dataclass(frozen=True)
class PairResult:
    """One pair, measured once."""

    a: str
    b: str
    alone: bool
    """True when no other pair was at work."""
    concurrency: int
    """Pairs at work in that round."""
    at_a: PairFigures
    at_b: PairFigures


@dataclass
class Outcome:
    """Everything that was measured, and what was not with its reason. Filled by the coordinator."""

    nodes: list[str]
    joined: dict[str, Joined] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer, with when."""
    pairs: list[PairResult] = field(default_factory=list)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of living nodes that could not measure, with the reason."""
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    devices_failed: dict[str, str] = field(default_factory=dict)
    backend: dict[tuple[str, str], tuple[str, BackendFigures]] = field(default_factory=dict)
    """(sender, receiver) -> the training backend and what messages over it take."""
    backend_failed: dict[str, str] = field(default_factory=dict)
    """Nodes whose part in those messages failed, with the reason."""
    rounds_done: int = 0
    rounds_planned: int = 0
    wall_s: float = 0.0
