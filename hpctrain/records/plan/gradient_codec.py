"""The base class of all gradient codecs: what the checks of a plan, the planner and the bench ask of a codec.

Before it come the encodings of messages between pipeline stages, and the sizes that all codecs count with.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, get_args

from hpctrain.records.format.document import Part

FULL_BYTES = 4
"""Bytes of a number in fp32, the type of gradients."""
SCALE_BYTES = 4 / 256
"""Bytes that each number sent as an integer takes in addition, for the fp32 scale of its block of 256."""
CodecRate = Literal["bf16", "quantized", "topk", "power_sgd"]
"""A field of `codec_s` in topology.json: seconds that a probe measured for a codec on a device."""
Messages = Literal["none", "bf16", "int8"]
"""Encoding of a message between two pipeline stages."""


class MessageEncoding(NamedTuple):
    """Bytes, processor time and lossiness of one encoding."""

    number_bytes: float
    """Bytes sent for a number of an activation, or of its gradient."""
    measured_as: CodecRate | None = None
    """Field of `codec_s` in topology.json with the encoding's processor seconds; None: encoding takes no time."""
    lossy: bool = False
    """Whether mode auto chooses the encoding only with `lossy`."""


MESSAGES: dict[Messages, MessageEncoding] = {
    "none": MessageEncoding(FULL_BYTES),
    "bf16": MessageEncoding(2, "bf16"),
    "int8": MessageEncoding(1 + SCALE_BYTES, "quantized", lossy=True),
}
"""Name -> encoding, the most exact first."""


Values = Literal["fp32", "fp16", "bf16", "int8", "sign"]
ShardedSums = Literal["all", "selected", "none"]
"""What a codec can send where each rank needs only the sums of its own shard. all: every number. selected: some
numbers, once a step. none: the codec does not work there."""

VALUE_BYTES: dict[Values, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "sign": 1 / 8}
"""Precision -> bytes of a sent number, without the scale of its block."""
RESIDUAL_BYTES = {"fp32": 4, "bf16": 2}
"""Precision -> bytes of a number in the residual."""


class CompressionSettings(Part):
    """Settings that every mode of `compression` has."""

    activations: Messages | Literal["auto"] | None = None
    """How activations and their gradients are sent between pipeline stages on different nodes. none: in fp32. bf16.
    int8: integers of 8 bits with a scale for each 256 of them. auto: the planner chooses none or bf16, or int8 with
    mode auto and `lossy`. Default: auto with mode auto, else none."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        """The value of `activations`; where it is left out, its default."""
        return self.activations or "none"


class GradientCodec(CompressionSettings):
    """Base class of all gradient codecs. A method that a codec does not override returns what holds for exact sums."""

    exact: ClassVar[bool] = False
    """Whether the sums of gradients equal those without compression."""
    has_state: ClassVar[bool] = True
    """Whether a rank's reducer keeps something from one step to the next."""
    lossy: ClassVar[bool] = False
    """Whether the codec leaves out most of each gradient, so that the loss may be higher after the same number of
    steps."""
    sums_gradients: ClassVar[bool] = True
    """Whether the codec sums gradients in each step; else it combines weights every few steps."""
    auto_settings: ClassVar[dict[str, Any] | None] = None
    """The settings with which mode auto tries the codec; None: mode auto does not choose it."""
    sharded_sums: ClassVar[ShardedSums] = "none"
    """What the codec sends where the optimizer state is sharded over all replicas; none: it does not work there,
    because its messages bring the sums to all ranks."""
    all_to_all: ClassVar[bool] = False
    """Whether every rank sends to every other rank, instead of around a ring."""
    overlap: ClassVar[float] = 0.0
    """Share of the codec's messages that may overlap the backward pass."""
    measured_as: ClassVar[CodecRate | None] = None
    """Field of `codec_s` in topology.json with the codec's processor seconds for each number; None: the codec takes the
    time of copying gradients to buckets and back."""
    reduce_scatter_share: ClassVar[float] = 0.0
    """Share of the processor seconds that a reduce-scatter alone takes."""

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """Return the values of `mode` that select this codec."""
        return get_args(cls.model_fields["mode"].annotation)

    @property
    def dense_bytes(self) -> float:
        """Return the bytes of a sent number, for a codec that sends all numbers; 4, as for exact sums, for other
        codecs."""
        return FULL_BYTES

    def number_bytes(self, world: int, dim: float) -> float:
        """Return the bytes on the wire for each number of a gradient; with exact sums it is 4.

        Args:
            world: replicas.
            dim: width of the model, the largest side of a square matrix.
        """
        return self.dense_bytes

    def wire_bytes(self, gradient_bytes: float, world: int, dim: float = 1024) -> float:
        """Return the bytes that all replicas together send in one reduction, after the warm-up steps.

        Every parameter counts as compressed, so a model's real traffic is larger by its exempt parameters.

        Args:
            gradient_bytes: size of the gradient in fp32.
            world: replicas, n. A ring all-reduce of size s sends 2·(n−1)·s in all.
            dim: as for `number_bytes`.
        """
        return 2.0 * (world - 1) * (gradient_bytes / FULL_BYTES) * self.number_bytes(world, dim)

    def rounds(self, buckets: int, world: int) -> float:
        """Return the number of message rounds in a reduction.

        Args:
            buckets: number of buckets of the gradient in fp32.
            world: replicas.
        """
        return buckets

    def passes(self, world: int) -> float:
        """Return how many times a reduction takes the processor seconds of `measured_as` for each number."""
        return 1.0

    def state_bytes(self, dim: int) -> float:
        """Return the bytes of state that a rank's reducer keeps between steps, for each number of its gradients.

        Args:
            dim: width of the model, the smallest side of a matrix.
        """
        return 0.0

    def why_no_matrices(self, dim: int, width: float) -> str | None:
        """Return why the codec compresses none of the model's matrices; None if it compresses some.

        Args:
            dim: width of the model.
            width: side of the square matrix that a low-rank product shrinks by the same factor as the model's matrices.
        """
        return None


def sparse_bytes(density: float, values: Values) -> float:
    """Return the bytes sent for each number of a gradient at this density: the values, and their positions as a bitmap,
    as 16 bits each, or as one byte for each gap, whichever is smallest."""
    return density * VALUE_BYTES[values] + min(1 / 8, 2 * density, max(density, 1 / 255))
