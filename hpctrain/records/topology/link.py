"""Parts of topology.json about messages between two nodes: figures of a pair, and classes of pairs."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part


class Latency(Part):
    """One-way latency of a small message: half the round trip."""

    min: float
    """Minimum, seconds."""
    p50: float
    """Median, seconds."""
    p95: float
    """95th percentile, seconds."""


class BackendFigures(Part):
    """The model t = alpha + beta·bytes for messages over torch's communication backend."""

    alpha_s: float
    """Start-up time of a message, seconds."""
    beta_s_per_byte: float = Field(gt=0)
    """Time per byte."""
    break_bytes: int | None = None
    """Size in bytes from which messages follow another line, where there is such a size."""
    network: str | None = None
    """Network that NCCL reports for messages between nodes: IB, Socket."""


def _training_backend(measured: dict[str, BackendFigures]) -> BackendFigures | None:
    """Return the figures of the backend that a run uses between nodes: NCCL where it was measured, else gloo."""
    return measured.get("nccl") or measured.get("gloo")


class LinkFigures(Part):
    """Measured figures of one direction between two nodes."""

    latency_s: Latency | None = None
    """Latency of a small message."""
    isolated_bytes_per_s: float | None = None
    """Bandwidth timed at the receiver, while `concurrency` pairs send."""
    loaded_bytes_per_s: float | None = None
    """Bandwidth while all nodes send at once."""
    concurrency: int | None = None
    """Number of pairs that sent while `isolated_bytes_per_s` was measured."""
    alpha_s: float | None = None
    """Start-up time of a message in the model t = alpha + beta·bytes, seconds."""
    beta_s_per_byte: float | None = None
    """Time per byte in that model."""
    break_bytes: int | None = None
    """Smallest measured size in bytes that follows `beta_s_per_byte`, where small messages follow another line;
    `alpha_s` is then that of small messages."""
    jitter: float | None = None
    """95th percentile of the latency divided by its median."""
    cpu_contended: bool | None = None
    """Whether a processor, and not the network, limited the bandwidth."""
    transport: str | None = None
    """Transport of the messages: tcp."""
    iface: str | None = None
    """Network interface that the sender's socket used."""
    backend: dict[str, BackendFigures] = {}
    """Name of the training backend (gloo, nccl) -> figures of messages over it. The planner uses these where
    present."""
    n: int | None = None
    """Number of samples behind the bandwidth."""
    inferred: bool = False
    """Whether the figures were not measured, but taken from the link's class."""

    def cost(self) -> tuple[float, float] | None:
        """Return (alpha in seconds, beta in seconds per byte) for a run's messages: over the training backend where
        that was measured, else over TCP; None where neither is known."""
        over = _training_backend(self.backend)
        if over:
            return over.alpha_s, over.beta_s_per_byte
        if self.alpha_s is None or self.beta_s_per_byte is None:
            return None
        return self.alpha_s, self.beta_s_per_byte


class Link(Part):
    """A pair of nodes, both directions."""

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
        """Return ((source, target), figures) for each of the two directions."""
        return ((self.a, self.b), self.ab), ((self.b, self.a), self.ba)


class LinkClass(Part):
    """A class of links with similar figures; a pair without measured figures takes those of its class."""

    id: str
    """Name of the class, which links refer to."""
    alpha_s: float
    """Start-up time of a message in the model t = alpha + beta·bytes, seconds."""
    beta_s_per_byte: float
    """Time per byte in that model."""
    pairs: int
    """Number of measured pairs that the class is based on."""
    backend: dict[str, BackendFigures] = {}
    """Name of the training backend -> figures of messages over it."""
    level: int | None = None
    """Level of the lowest cluster that holds both nodes of a pair; 0: no cluster holds both. Absent: the class is of
    all pairs."""

    def cost(self) -> tuple[float, float]:
        """Return (alpha in seconds, beta in seconds per byte) for a run's messages: over the training backend where
        that was measured, else over TCP."""
        over = _training_backend(self.backend)
        return (over.alpha_s, over.beta_s_per_byte) if over else (self.alpha_s, self.beta_s_per_byte)
