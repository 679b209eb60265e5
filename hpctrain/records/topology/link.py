"""Parts of topology.json about messages between two nodes: links with measured figures, and link classes."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part
from hpctrain.records.topology.figures import Count, Level, PositiveSecondsPerByte, Rate, Ratio, Seconds, SecondsPerByte


class Latency(Part):
    """Latency of a small message over one link: half the round trip."""

    min: Seconds
    """Minimum, seconds."""
    p50: Seconds
    """Median, seconds."""
    p95: Seconds
    """95th percentile, seconds."""


class BackendFigures(Part):
    """Model of a message over torch's communication backend: time = alpha + beta × bytes for messages of all sizes."""

    alpha_s: Seconds
    """Start-up time of a message, seconds."""
    beta_s_per_byte: PositiveSecondsPerByte
    """Time per byte of a message, seconds."""
    break_bytes: Count | None = None
    """Smallest measured size in bytes of a large message, if small and large messages lie on different lines; None if
    no such break was found. With a break, `alpha_s` is fitted to the small messages and `beta_s_per_byte` to the large
    ones.
    """
    network: str | None = None
    """Network that NCCL reports for messages between nodes, such as IB or Socket."""


def _training_backend(measured: dict[str, BackendFigures]) -> BackendFigures | None:
    """Return the figures of the backend that a run uses between nodes: of NCCL if it was measured, else of gloo; None
    if neither was measured. `measured` has the figures by name of the backend."""
    return measured.get("nccl") or measured.get("gloo")


class LinkFigures(Part):
    """Figures of messages from one node to another."""

    latency_s: Latency | None = None
    """Latency of a small message."""
    isolated_bytes_per_s: Rate | None = None
    """Isolated bandwidth: measured by the receiver, while only this pair sent; absent if the pair was never alone."""
    loaded_bytes_per_s: Rate | None = None
    """Loaded bandwidth: measured while all pairs of the round sent."""
    concurrency: Count | None = None
    """Number of pairs that measured at the same time as the latency: 1 if this pair was alone."""
    alpha_s: Seconds | None = None
    """Start-up time of a TCP message, seconds: alpha in time = alpha + beta × bytes."""
    beta_s_per_byte: SecondsPerByte | None = None
    """Time per byte of a TCP message, seconds: beta in time = alpha + beta × bytes."""
    break_bytes: Count | None = None
    """Smallest measured size in bytes of a large message, if small and large messages lie on different lines; None if
    no such break was found. With a break, `alpha_s` is fitted to the small messages and `beta_s_per_byte` to the large
    ones."""
    jitter: Ratio | None = None
    """95th percentile of the latency divided by its median."""
    cpu_contended: bool | None = None
    """Whether a CPU, and not the network, limited the bandwidth."""
    transport: str | None = None
    """Transport of the measured messages: tcp."""
    iface: str | None = None
    """Network interface that the sender's socket used."""
    backend: dict[str, BackendFigures] = {}
    """Training backend (gloo, nccl) -> figures of messages over it. If present, the planner uses them in place of the
    TCP figures."""
    n: Count | None = None
    """Number of slices of the transfer whose median rate is `isolated_bytes_per_s`, or without it
    `loaded_bytes_per_s`."""
    inferred: bool = False
    """Whether the figures were not measured, but taken from the link class."""

    def cost(self) -> tuple[float, float] | None:
        """Return (alpha in seconds, beta in seconds per byte) of messages over the training backend if they were
        measured, else of messages over TCP; None if neither was measured."""
        over = _training_backend(self.backend)
        if over:
            return over.alpha_s, over.beta_s_per_byte
        if self.alpha_s is None or self.beta_s_per_byte is None:
            return None
        return self.alpha_s, self.beta_s_per_byte


class Link(Part):
    """A pair of nodes with the figures of both directions."""

    a: str
    """One node."""
    b: str
    """The other node."""
    class_: str | None = Field(default=None, alias="class")
    """Id of the link class that the pair belongs to."""
    ab: LinkFigures
    """From a to b."""
    ba: LinkFigures
    """From b to a."""

    def directions(self) -> tuple[tuple[tuple[str, str], LinkFigures], ...]:
        """Return ((source node, target node), figures) for each of the two directions."""
        return ((self.a, self.b), self.ab), ((self.b, self.a), self.ba)


class LinkClass(Part):
    """A link class: links with similar figures. A pair that was not measured gets the figures of its class."""

    id: str
    """Name of the class; `class` of a link is this name."""
    alpha_s: Seconds
    """Start-up time of a TCP message, seconds: alpha in time = alpha + beta × bytes."""
    beta_s_per_byte: SecondsPerByte
    """Time per byte of a TCP message, seconds: beta in time = alpha + beta × bytes."""
    pairs: Count
    """Number of measured pairs from which the figures were taken."""
    backend: dict[str, BackendFigures] = {}
    """Training backend (gloo, nccl) -> figures of messages over it."""
    level: Level | None = None
    """The class has the pairs whose lowest common cluster of nodes is at this level of switches (1: next to the nodes).
    0: pairs without a common cluster. Absent: all pairs."""

    def cost(self) -> tuple[float, float]:
        """Return (alpha in seconds, beta in seconds per byte) of messages over the training backend if they were
        measured, else of messages over TCP."""
        over = _training_backend(self.backend)
        return (over.alpha_s, over.beta_s_per_byte) if over else (self.alpha_s, self.beta_s_per_byte)
