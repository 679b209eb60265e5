"""The codec of a plan: which compression the workers use, and what it sends and keeps."""

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
"""Size of a gradient bucket: large enough for full bandwidth, small enough that the first ones are sent early."""
RESIDUAL_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number in the residual."""
FULL_BYTES = 4
"""Bytes of a number in fp32, the type of gradients."""
VALUE_BYTES: dict[Values, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "sign": 1 / 8}
"""Bytes of a number that is sent, without the scale of its block."""

SCALE_BYTES = 4 / 256
"""Bytes that the scale of its block adds to each number that is sent as an integer."""


class CodecFigures(Part):
    """The planner's prediction for one codec, on the pipeline rank whose all-reduce takes longest."""

    codec: Codec
    """The codec."""
    sent_bytes: float | None = None
    """Bytes that a device sends in a step, after the warm-up steps."""
    wire_s: float | None = None
    """Seconds of the messages on the slowest link: their number times alpha plus their bytes times beta."""
    processor_s: float | None = None
    """Seconds of selecting, encoding, decoding and copying numbers."""
    hidden_s: float | None = None
    """Seconds of the messages that overlap the backward pass."""
    step_s: float | None = None
    """Seconds of a whole step: the mean over the run, warm-up steps included. Absent where the codec cannot be used."""
    verdict: str
    """'chosen', or why it was not chosen."""


class CodecSpec(Part):
    """How gradients are reduced between replicas."""

    level: Literal["dp"] = "dp"
    """Mesh axis of the reduction: the replicas or, under hybrid sharding, the copies of a sharded state."""
    codec: Codec = Field(default_factory=NoCompression)
    """The codec with all settings and the layers that it compresses."""
    reason: str | None = None
    """With mode auto: why this codec was chosen."""
    compared: list[CodecFigures] = []
    """With mode auto: the codecs that were compared, the least lossy first."""

    @model_validator(mode="after")
    def _only_gradients(self) -> CodecSpec:
        if self.codec.activations is not None:
            raise ValueError(
                f"codec.activations: found {self.codec.activations}; a plan says it by stage: stages[…].messages"
            )
        return self

    @property
    def mode(self) -> str:
        """Mode of the codec, as in run.yaml."""
        return self.codec.mode

    @property
    def exact(self) -> bool:
        """Whether sums are the same as without compression."""
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
    """Return the bytes sent for a number by a codec that sends all numbers; for other codecs, those of exact sums."""
    match codec:
        case Bf16():
            return VALUE_BYTES["bf16"]
        case Quantized():
            return codec.bits / 8 + SCALE_BYTES
    return FULL_BYTES


def wire_bytes(codec: Codec, gradient_bytes: float, world: int, dim: float = 1024) -> float:
    """Return the bytes that all replicas together send in one reduction, after the warm-up steps.

    Every parameter counts as compressed, so a model's real traffic is larger by its exempt parameters.

    Args:
        gradient_bytes: size of the gradient in fp32.
        world: replicas, n. A ring all-reduce of size s sends 2·(n−1)·s in all.
        dim: width of the model; for power_sgd, whose messages depend on the sides of matrices: for an m × n matrix
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
            # The layers' densities between the limits are known only after profiling, so the middle is assumed.
            return ring * numbers * sparse_bytes(1 - sum(limits) / 2, values)
        case Tagc(density=density, ratio=ratio):
            # With auto, a number for each position that any rank sends; fewer where ranks select the same positions.
            share = min(1.0, density * world) if ratio == "auto" else 1 / ratio
            # Each rank's bitmap of positions goes to every other rank.
            return ring * gradient_bytes * share + world * (world - 1) * numbers / 8
        case PowerSgd(rank=rank):
            return ring * gradient_bytes * min(1.0, 2.0 * rank / dim)
        case LocalSteps(every=every):
            return ring * gradient_bytes / every
    return ring * gradient_bytes


def message_bytes_per_element(messages: Messages) -> float:
    """Return the bytes sent for a number of an activation, or of its gradient, between two pipeline stages."""
    match messages:
        case "bf16":
            return VALUE_BYTES["bf16"]
        case "int8":
            return VALUE_BYTES["int8"] + SCALE_BYTES
    return FULL_BYTES


def kept_bytes(codec: Codec, dim: int) -> float:
    """Return the bytes of state that a rank's reducer keeps between steps, for each number of its gradients.

    Args:
        dim: width of the model, the smallest side of a matrix.
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
            # Besides the residual: both factors, and the initial directions, to which a reset returns.
            return FULL_BYTES * (1 + 3 * codec.rank / dim)
        case LocalSteps():
            return 2 * FULL_BYTES  # the weights at the last outer sync, and the outer velocity
    return 0.0


def sparse_bytes(density: float, values: Values) -> float:
    """Return the bytes sent for each number of a gradient at this density: the values, and their positions as a bitmap,
    as 16 bits each, or as one byte for each gap, whichever is smallest."""
    return density * VALUE_BYTES[values] + min(1 / 8, 2 * density, max(density, 1 / 255))
