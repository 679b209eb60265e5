"""The codec of a plan: which compression the workers obey, and what it puts on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.compression import (
    Adaptive,
    Bf16,
    Codec,
    LocalSteps,
    Messages,
    NoCompression,
    PowerSgd,
    Quantized,
    Tagc,
    TopK,
    Values,
)

BUCKET_BYTES = 8 * 2**20
"""Gradients are sent in pieces of this size: large enough for full bandwidth, small enough that some leave early."""
RESIDUAL_BYTES = {"fp32": 4, "bf16": 2}
"""Of a number that was not sent."""
FULL_BYTES = 4
"""Of a number in fp32, which gradients are."""
VALUE_BYTES: dict[Values, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "sign": 1 / 8}
"""Bytes of a number that is sent; the scales of its block are not counted."""

SCALE_BYTES = 4 / 256
"""For each number that is sent as an integer: what the scale of its block adds."""


class CodecFigures(Part):
    """What the planner expects of one way of summing, of the pipeline rank that sums the longest."""

    codec: Codec
    """The way."""
    sent_bytes: float | None = None
    """A device puts on the wire in a step, once the warm-up steps are done."""
    wire_s: float | None = None
    """Messages, by the slowest link: their number times alpha, and their bytes times beta."""
    processor_s: float | None = None
    """Choosing, writing, reading and copying numbers."""
    hidden_s: float | None = None
    """Of the messages, what passes beside the backward pass."""
    step_s: float | None = None
    """A whole step: the mean over the run, warm-up steps included. Absent where this way cannot be taken."""
    verdict: str
    """chosen, or why not."""


class CodecSpec(Part):
    """How gradients are reduced between replicas."""

    level: Literal["dp"] = "dp"
    """Between whom: the replicas; where a state is sharded within nodes and copied across them, the copies."""
    codec: Codec = Field(default_factory=NoCompression)
    """How, with all settings and the layers it works on."""
    reason: str | None = None
    """With mode auto: why this one."""
    compared: list[CodecFigures] = []
    """With mode auto: the ways that were compared, the most exact first."""

    @model_validator(mode="after")
    def _only_gradients(self) -> CodecSpec:
        if self.codec.activations is not None:
            raise ValueError(
                f"codec.activations: found {self.codec.activations}; a plan says it by stage: stages[…].messages"
            )
        return self

    @property
    def mode(self) -> str:
        """Of the codec, as in run.yaml."""
        return self.codec.mode

    @property
    def exact(self) -> bool:
        """Whether sums come out as they would without any compression."""
        return isinstance(self.codec, NoCompression)

    @property
    def has_state(self) -> bool:
        """Whether a rank's reducer keeps something from one step to the next."""
        return has_state(self.codec)


NO_COMPRESSION_CODEC = CodecSpec()


def has_state(codec: Codec) -> bool:
    """Whether a rank's reducer keeps something from one step to the next."""
    return not isinstance(codec, NoCompression | Bf16)


def dense_bytes(codec: Codec) -> float:
    """On the wire, of a number in sums that send all of them; with other codecs those of exact sums."""
    match codec:
        case Bf16():
            return VALUE_BYTES["bf16"]
        case Quantized():
            return codec.bits / 8 + SCALE_BYTES
    return FULL_BYTES


def wire_bytes(codec: Codec, gradient_bytes: float, world: int, dim: float = 1024) -> float:
    """Bytes on the wire over all replicas for one reduction, once the warm-up steps are done.

    Every parameter counts as compressed, so a model's real traffic is larger by its exempt parameters.

    Args:
        gradient_bytes: of the gradient in fp32.
        world: replicas, n. A ring all-reduce of size s sends 2·(n−1)·s in all.
        dim: width of the model; for power_sgd, whose messages go by the sides of matrices: of an m × n matrix
            r·(m+n) numbers are sent, here for m = n = dim, the most that a matrix with a side of that width costs.
    """
    ring = 2.0 * (world - 1)
    numbers = gradient_bytes / FULL_BYTES
    match codec:
        case Bf16() | Quantized():
            return ring * numbers * dense_bytes(codec)
        case TopK(density=density, values=values):
            return ring * numbers * sparse_bytes(density, values)
        case Adaptive(limits=limits, values=values):
            # Where the layers lie between the limits is known only once their gradients were seen.
            return ring * numbers * sparse_bytes(1 - sum(limits) / 2, values)
        case Tagc(density=density, ratio=ratio):
            # With auto, a number for each position that any rank sends; where they choose alike it is fewer.
            share = min(1.0, density * world) if ratio == "auto" else 1 / ratio
            # The bitmaps of what each rank sends go to every other one.
            return ring * gradient_bytes * share + world * (world - 1) * numbers / 8
        case PowerSgd(rank=rank):
            return ring * gradient_bytes * min(1.0, 2.0 * rank / dim)
        case LocalSteps(every=every):
            return ring * gradient_bytes / every
    return ring * gradient_bytes


def message_bytes_per_element(messages: Messages) -> float:
    """Of an activation, or of its gradient, between two pipeline stages."""
    match messages:
        case "bf16":
            return VALUE_BYTES["bf16"]
        case "int8":
            return VALUE_BYTES["int8"] + SCALE_BYTES
    return FULL_BYTES


def kept_bytes(codec: Codec, dim: int) -> float:
    """What a rank keeps from step to step for each number of its gradients: what it has not sent, and directions.

    Args:
        dim: width of the model, the least side of a matrix.
    """
    match codec:
        case Quantized():
            return FULL_BYTES
        case TopK() | Tagc():
            return 0.0 if codec.feedback == "none" else RESIDUAL_BYTES[codec.residual]
        case Adaptive():
            # A mean of the gradients is kept while variances are measured.
            return FULL_BYTES + (0.0 if codec.feedback == "none" else RESIDUAL_BYTES[codec.residual])
        case PowerSgd():
            # Beside the residual both factors, and the directions to begin anew with.
            return FULL_BYTES * (1 + 3 * codec.rank / dim)
        case LocalSteps():
            return 2 * FULL_BYTES  # the place of the last meeting, and the outer velocity
    return 0.0


def sparse_bytes(density: float, values: Values) -> float:
    """Bytes for each number of a gradient of which this share is sent: the values, and their positions as a bitmap,
    as 16 bits each, or as one byte for each gap, whichever is least."""
    return density * VALUE_BYTES[values] + min(1 / 8, 2 * density, max(density, 1 / 255))
