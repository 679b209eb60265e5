"""What all codecs of gradients have in common: what the checks of a plan, the planner and the bench ask of each."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from hpctrain.records.format.document import Part
from hpctrain.records.plan.stage_messages import FULL_BYTES, CodecRate, Messages

Values = Literal["fp32", "fp16", "bf16", "int8", "sign"]
ShardedSums = Literal["all", "selected", "none"]
"""What a codec sends of a gradient whose sums belong to one rank each: every number, some once a step, or nothing."""

VALUE_BYTES: dict[Values, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "sign": 1 / 8}
"""Bytes of a number that is sent, without the scale of its block."""
RESIDUAL_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number in the residual."""


class CompressionSettings(Part):
    """Settings of every mode."""

    activations: Messages | Literal["auto"] | None = None
    """How activations and their gradients are sent between pipeline stages on different nodes. none: in fp32. bf16.
    int8: integers of 8 bits with a scale for each 256 of them. auto: the planner chooses none or bf16, or int8 with
    mode auto and `lossy`. Default: auto with mode auto, else none."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        """The value of `activations`, or its default where it is left out."""
        return self.activations or "none"


class GradientCodec(CompressionSettings):
    """What all codecs of gradients have in common. Where a codec overrides nothing, it is as exact sums are."""

    exact: ClassVar[bool] = False
    """Whether sums are the same as without compression."""
    has_state: ClassVar[bool] = True
    """Whether a rank's reducer keeps something from one step to the next."""
    lossy: ClassVar[bool] = False
    """Whether it leaves out most of each gradient: after the same number of steps the loss may be higher."""
    sums_gradients: ClassVar[bool] = True
    """Whether gradients are summed, rather than weights combined every few steps."""
    auto_settings: ClassVar[dict[str, Any] | None] = None
    """The settings with which mode auto tries it; None: mode auto does not choose it."""
    sharded_sums: ClassVar[ShardedSums] = "none"
    """What it sends where a state is sharded over all replicas; none: its messages bring sums to all ranks."""
    all_to_all: ClassVar[bool] = False
    """Whether it sends messages from every rank to every other, instead of around a ring."""
    overlap: ClassVar[float] = 0.0
    """Share of its messages that may overlap the backward pass."""
    measured_as: ClassVar[CodecRate | None] = None
    """The measurement that has its processor seconds; None: those of copying gradients to buckets and back."""
    reduce_scatter_share: ClassVar[float] = 0.0
    """Share of these seconds that a reduce-scatter alone takes."""

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """The values of `mode` that select this codec."""
        return get_args(cls.model_fields["mode"].annotation)

    @property
    def dense_bytes(self) -> float:
        """Bytes sent for a number by a codec that sends all numbers; for other codecs, those of exact sums."""
        return FULL_BYTES

    def number_bytes(self, world: int, dim: float) -> float:
        """Bytes on the wire for each number of a gradient, where exact sums have 4.

        Args:
            world: replicas.
            dim: width of the model, the largest side of a square matrix.
        """
        return self.dense_bytes

    def wire_bytes(self, gradient_bytes: float, world: int, dim: float = 1024) -> float:
        """Bytes that all replicas together send in one reduction, after the warm-up steps.

        Every parameter counts as compressed, so a model's real traffic is larger by its exempt parameters.

        Args:
            gradient_bytes: size of the gradient in fp32.
            world: replicas, n. A ring all-reduce of size s sends 2·(n−1)·s in all.
            dim: as for `number_bytes`.
        """
        return 2.0 * (world - 1) * (gradient_bytes / FULL_BYTES) * self.number_bytes(world, dim)

    def rounds(self, buckets: int, world: int) -> float:
        """Rounds of messages in a reduction.

        Args:
            buckets: those of the gradient in fp32.
            world: replicas.
        """
        return buckets

    def passes(self, world: int) -> float:
        """How often a number takes the processor seconds of `measured_as` in a reduction."""
        return 1.0

    def state_bytes(self, dim: int) -> float:
        """Bytes of state that a rank's reducer keeps between steps, for each number of its gradients.

        Args:
            dim: width of the model, the smallest side of a matrix.
        """
        return 0.0

    def why_no_matrices(self, dim: int, width: float) -> str | None:
        """Why it compresses none of the model's matrices; None if it does.

        Args:
            dim: width of the model.
            width: side of a square matrix that low rank compresses as well.
        """
        return None


def sparse_bytes(density: float, values: Values) -> float:
    """Return the bytes sent for each number of a gradient at this density: the values, and their positions as a bitmap,
    as 16 bits each, or as one byte for each gap, whichever is smallest."""
    return density * VALUE_BYTES[values] + min(1 / 8, 2 * density, max(density, 1 / 255))
