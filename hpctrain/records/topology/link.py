"""Parts of topology.json that say what messages between two nodes take: figures of a pair, and classes of pairs."""

from __future__ import annotations

from pydantic import Field

from hpctrain.records.format.document import Part


class Latency(Part):
    """One-way latency of a small message: half the round trip."""

    min: float
    """The fastest, in seconds."""
    p50: float
    """The median, in seconds."""
    p95: float
    """95 of 100 are faster, in seconds."""


class BackendFigures(Part):
    """The model t = alpha + beta·bytes of messages that torch's communication backend carries."""

    alpha_s: float
    """Start-up time of a message."""
    beta_s_per_byte: float = Field(gt=0)
    """Time per byte."""
    break_bytes: int | None = None
    """Size from which messages behave differently, where there is one."""
    network: str | None = None
    """What NCCL says that it carries messages between nodes with: IB, Socket."""


def _training_backend(measured: dict[str, BackendFigures]) -> BackendFigures | None:
    """The figures of the backend that carries a run between nodes: NCCL where it was measured, else Gloo."""
    return measured.get("nccl") or measured.get("gloo")


class LinkFigures(Part):
    """One direction between two nodes."""

    latency_s: Latency | None = None
    """Of a small message."""
    isolated_bytes_per_s: float | None = None
    """Bandwidth timed at the receiver, with `concurrency` pairs at work."""
    loaded_bytes_per_s: float | None = None
    """Bandwidth with every node at work at once."""
    concurrency: int | None = None
    """Pairs at work while the isolated figure was taken."""
    alpha_s: float | None = None
    """Start-up time of a message in the model t = alpha + beta·bytes."""
    beta_s_per_byte: float | None = None
    """Time per byte in that model."""
    break_bytes: int | None = None
    """Smallest measured size that follows beta where small messages behave differently (alpha is theirs)."""
    jitter: float | None = None
    """p95 over p50 of the latency."""
    cpu_contended: bool | None = None
    """True when a processor and not the wire set the pace of the bandwidth."""
    transport: str | None = None
    """What carried it: tcp."""
    iface: str | None = None
    """Network interface that the sender's socket really used."""
    backend: dict[str, BackendFigures] = {}
    """The same model over the training backend, by its name: gloo, nccl. What a plan should use."""
    n: int | None = None
    """Samples behind the bandwidth."""
    inferred: bool = False
    """True when taken from the class, not measured."""

    def cost(self) -> tuple[float, float] | None:
        """(alpha, beta) of what a training run sends: over its backend where that was measured; None for neither."""
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
    """Class of links it belongs to."""
    ab: LinkFigures
    """From a to b."""
    ba: LinkFigures
    """From b to a."""


class LinkClass(Part):
    """Links that behave alike; a pair without figures of its own has these."""

    id: str
    """Name that links refer to."""
    alpha_s: float
    """Start-up time of a message in the model t = alpha + beta·bytes."""
    beta_s_per_byte: float
    """Time per byte in that model."""
    pairs: int
    """How many measured pairs are behind it."""
    backend: dict[str, BackendFigures] = {}
    """The same model over the training backend, by its name."""
    level: int | None = None
    """Height of the lowest cluster that holds both ends; 0: none does. Absent: the class is of all pairs."""

    def cost(self) -> tuple[float, float]:
        """(alpha, beta) of what a training run sends: over its backend where that was measured."""
        over = _training_backend(self.backend)
        return (over.alpha_s, over.beta_s_per_byte) if over else (self.alpha_s, self.beta_s_per_byte)
