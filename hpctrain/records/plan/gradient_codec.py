"""The base class of all gradient codecs: what the checks of a plan, the planner and the bench ask of a codec. Also the
encodings of stage messages, and the sizes of numbers in each precision.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BeforeValidator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.layer_groups import LayerGroup
from hpctrain.records.plan.loss_gaps import LOSS_GAPS, LossGap

FULL_BYTES = 4
"""Bytes of a number in fp32, the type of gradients."""
SCALE_BYTES = 4 / 256
"""Bytes that the scales add to each number that is sent as an integer: an fp32 scale for each block of 256 numbers."""
ROTATED_SCALE_BYTES = 2 / 256
"""Bytes that the scales add to each number that is sent as a rotated integer: a bf16 scale for each block of 256
numbers."""
CodecRate = Literal["bf16", "quantized", "topk", "power_sgd", "rotated"]
"""A field of `codec_s` in topology.json: seconds for one number of a gradient that a probe measured on a device."""
Messages = Literal["none", "bf16", "int8"]
"""Name of the encoding of a stage message; none: fp32."""


class MessageEncoding(NamedTuple):
    """An encoding of stage messages: its bytes, its time on a device, and whether it loses much precision."""

    number_bytes: float
    """Bytes sent for each number of an activation, or of its gradient."""
    measured_as: CodecRate | None = None
    """Field of `codec_s` in topology.json with a device's seconds for each number; None: encoding takes no time."""
    lossy: bool = False
    """Whether `activations: auto` chooses the encoding only if mode auto has `lossy: true`."""


MESSAGES: dict[Messages, MessageEncoding] = {
    "none": MessageEncoding(FULL_BYTES),
    "bf16": MessageEncoding(2, "bf16"),
    "int8": MessageEncoding(1 + SCALE_BYTES, "quantized", lossy=True),
}
"""Name of an encoding of stage messages -> encoding, the one with the most bytes first."""


Values = Literal["fp32", "fp16", "bf16", "int8", "sign"]
ShardedSums = Literal["all", "selected", "none"]
"""How a codec works if state is sharded over all replicas (ZeRO level 1 to 3), so that each rank needs only the sums
of its own shard. all: it sends every number, at ZeRO levels 2 and 3 in every micro-batch. selected: it sends some
numbers, and only once a step, so ZeRO levels 2 and 3 need a single micro-batch. none: it does not work."""

VALUE_BYTES: dict[Values, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "sign": 1 / 8}
"""Precision -> bytes of a sent number, without the scale of its block."""
RESIDUAL_BYTES = {"fp32": 4, "bf16": 2}
"""Precision -> bytes of a number in the residual."""

IntraNode = Literal["flat", "none", "bf16"]
"""How gradients are summed among the replicas of a node before anything is sent to other nodes. none: in fp32. bf16: in
bfloat16. flat: not at all; all replicas are alike, whether or not they share a node."""
TensorParallelSums = Literal["none", "bf16"]
"""How tensor-parallel devices on different nodes sum activations and their gradients. none: exactly. bf16: in
bfloat16."""
Level = Literal["dp", "intra_node", "inter_node"]
"""Level of a sum of gradients. dp: over all replicas. intra_node: over the replicas of a node. inter_node: over the
nodes, of the sums of each node."""


def _layers(value: object) -> object:
    """Return the value of the key `layers` unchanged, after checking its form.

    Raises:
        ValueError: the value has none of the allowed forms. Pydantic itself would report one error for each form.
    """
    if value in get_args(NamedLayers) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError(f"allowed: {', '.join(get_args(NamedLayers))}, or a list of patterns for names of parameters")


NamedLayers = Literal["all", "non_attention", "non_attention_linear", LayerGroup]
Layers = Annotated[NamedLayers | list[str], BeforeValidator(_layers)]


class CompressionSettings(Part):
    """Base class of all modes of `compression`, with the settings that every mode has: the encoding of stage messages,
    the sums within nodes, and the sums of tensor parallelism."""

    activations: Messages | Literal["auto"] | None = None
    """How activations and their gradients are sent between pipeline stages on different nodes. none: in fp32. bf16: in
    bfloat16. int8: as integers of 8 bits with a scale for each 256 of them. auto: the planner chooses none or bf16, and
    also int8 if mode auto has `lossy: true`. Default: auto with mode auto, else none."""

    intra_node: IntraNode | Literal["auto"] | None = None
    """How gradients are summed among the replicas of a node, before the codec sums over the nodes. none: in fp32. bf16:
    in bfloat16. flat: not at all; the codec sums over all replicas alike. auto: the planner chooses. Default: auto with
    mode auto, else flat. Nodes with one replica each, or with unequally many, have flat sums."""

    tensor_parallel: TensorParallelSums | Literal["auto"] | None = None
    """How tensor-parallel devices on different nodes send activations and their gradients for a sum. none: in fp32, or
    as autocast gives them. bf16: in bfloat16; the devices of a node first sum among themselves, without it. auto: the
    planner chooses. Default: auto with mode auto, else none. Validation always sums exactly."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        """Return the value of `activations`, or its default if the key is left out."""
        return self.activations or "none"

    @property
    def node_sums(self) -> IntraNode | Literal["auto"]:
        """Return the value of `intra_node`, or its default if the key is left out."""
        return self.intra_node or "flat"

    @property
    def tensor_sums(self) -> TensorParallelSums | Literal["auto"]:
        """Return the value of `tensor_parallel`, or its default if the key is left out."""
        return self.tensor_parallel or "none"


_OTHER_SETTINGS = {"mode", "activations", "intra_node", "tensor_parallel", "warmup_steps", "seed"}
"""Settings of codecs on which a loss is not taken to depend."""


class GradientCodec(CompressionSettings):
    """Base class of all gradient codecs. A method that a codec does not override returns what holds for exact sums."""

    mode: str
    """Name of the codec."""

    exact: ClassVar[bool] = False
    """Whether nothing is left out and nothing is rounded, so that sums are those without compression."""
    has_state: ClassVar[bool] = True
    """Whether a rank's reducer keeps state between steps, such as a residual."""
    lossy: ClassVar[bool] = False
    """Whether the codec leaves out most of each gradient."""
    may_raise_loss: ClassVar[bool] = False
    """Whether the loss may be higher after the same number of steps. Mode auto chooses such a codec only with `lossy`
    or with a `loss_budget`."""
    sums_gradients: ClassVar[bool] = True
    """Whether the codec sums gradients in each step; otherwise it combines weights every few steps."""
    auto_settings: ClassVar[dict[str, Any] | None] = None
    """The settings with which mode auto tries the codec; None: it tries the codec only with settings of which the loss
    was measured (`compared_settings`), and mode adaptive once gradients were measured (`adaptive_codec`)."""
    sharded_sums: ClassVar[ShardedSums] = "none"
    """How the codec works if state is sharded over all replicas, as `ShardedSums` describes. none: it does not work,
    because its messages bring all sums to all ranks."""
    overlap: ClassVar[float] = 0.0
    """Share of the codec's messages that may overlap the backward pass."""
    measured_as: ClassVar[CodecRate | None] = None
    """Field of `codec_s` in topology.json with the seconds that a device takes for the codec's work on each number.
    None: the codec only takes the time of copying gradients to buckets and back."""
    reduce_scatter_share: ClassVar[float] = 0.0
    """Share of the seconds of `measured_as` that a reduce-scatter without all-gather takes. If state is sharded, only
    the reduce-scatter of the gradients uses the codec. 0: the codec then does no work, or cannot be used, or its time
    is not modelled."""

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """Return the values of `compression.mode` that select this class."""
        return get_args(cls.model_fields["mode"].annotation)

    @property
    def rates(self) -> tuple[CodecRate, ...]:
        """Return the fields of `codec_s` whose seconds add up to those of the codec's work on each number; () if it
        only copies gradients."""
        return () if self.measured_as is None else (self.measured_as,)

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Return the mode and those settings of the codec that are not defaults, less those on which the loss is not
        taken to depend."""
        return {"mode": self.mode} | self.model_dump(exclude_defaults=True, exclude=_OTHER_SETTINGS)

    @property
    def label(self) -> str:
        """Return the mode and `loss_settings` as text: 'power_sgd', or 'power_sgd, remainder int2'."""
        mode, *settings = self.loss_settings.items()
        return ", ".join([mode[1], *(f"{name} {value}" for name, value in settings)])

    @property
    def short_label(self) -> str:
        """Return `label`, for codecs by layer group without these codecs."""
        return self.label

    @property
    def loss_gap(self) -> LossGap | None:
        """Return the measured gap of the validation loss to that of exact sums; None: not measured with these
        settings."""
        return next((gap for gap in LOSS_GAPS if gap.settings == self.loss_settings), None)

    @classmethod
    def compared_settings(cls, mode: str) -> list[dict[str, Any]]:
        """Return the settings with which mode auto tries a mode of the codec: `auto_settings`, and those with which a
        gap of the loss was measured. [] for codecs that do not sum gradients."""
        if not cls.sums_gradients:
            return []
        usual = [] if cls.auto_settings is None else [{"mode": mode, **cls.auto_settings}]
        measured = [gap.settings for gap in LOSS_GAPS if gap.settings["mode"] == mode]
        return usual + [settings for settings in measured if settings not in usual]

    def allowed_with(self, loss_limit: float) -> bool:
        """Return whether mode auto may choose the codec where the loss may exceed that of exact sums by the share
        `loss_limit`. Infinity allows all codecs. Codecs without `may_raise_loss` are always allowed: in measurements,
        their loss could not be told from that of exact sums. A limit of 0 allows no others, whatever was measured."""
        if not self.may_raise_loss or loss_limit == math.inf:
            return True
        return loss_limit > 0 and self.loss_gap is not None and self.loss_gap.share <= loss_limit

    @property
    def dense_bytes(self) -> float:
        """Return the bytes of a sent number, for a codec that sends all numbers of a gradient. For other codecs the
        result is 4, the bytes of fp32."""
        return FULL_BYTES

    def number_bytes(self, world: int, dim: float) -> float:
        """Return the size of a message divided by the count of numbers in the gradient that it stands for, in bytes.
        For exact sums it is 4.

        Args:
            world: number of replicas.
            dim: width of the model, and so the assumed side of its matrices.
        """
        return self.dense_bytes

    def wire_bytes(self, gradient_bytes: float, world: int, dim: float = 1024) -> float:
        """Return the bytes that all replicas together send in one reduction, after the warm-up steps.

        A ring all-reduce of s bytes over n replicas sends 2·(n−1)·s bytes in all. Every parameter counts as compressed,
        so a model with exempt parameters sends more.

        Args:
            gradient_bytes: size of the gradient in fp32.
            world: number of replicas, n.
            dim: width of the model, and so the assumed side of its matrices.
        """
        return 2.0 * (world - 1) * (gradient_bytes / FULL_BYTES) * self.number_bytes(world, dim)

    @property
    def early_share(self) -> float:
        """Return `overlap`, or what takes its place for codecs by layer group."""
        return self.overlap

    def all_to_all_share(self, world: int, dim: float) -> float:
        """Return the share of the sent bytes that all-to-alls carry; the others travel around rings, by all-reduces and
        all-gathers. It is a half for a codec that sends parts to their owners, and the sums back.

        Args:
            world: number of replicas.
            dim: width of the model, and so the assumed side of its matrices.
        """
        return 0.0

    def beside_share(self, world: int) -> float:
        """Return the share of the bytes of a sharded state's sums that are sent while a rank on a CPU computes. For the
        others, each rank waits until all ranks have begun the sum.

        Args:
            world: number of ranks over which the state is sharded.
        """
        return 1.0

    def rounds(self, buckets: int, world: int) -> float:
        """Return how many collectives a reduction needs one after the other. It is a mean over steps for a codec that
        does not reduce in every step.

        Args:
            buckets: number of buckets of the gradient in fp32.
            world: number of replicas.
        """
        return buckets

    def passes(self, world: int) -> float:
        """Return the factor by which to multiply the seconds of `measured_as`, so that they are the seconds that a
        device computes for each number of the gradient in a reduction over `world` replicas."""
        return 1.0

    def more_flop(self, width: float) -> float:
        """Return the FLOP of the codec's work on each number of a gradient that the seconds of `measured_as` leave out.

        Args:
            width: side of a square matrix that a low-rank product shrinks by the same factor as the model's matrices.
        """
        return 0.0

    def state_bytes(self, dim: int) -> float:
        """Return the bytes of state that a rank's reducer keeps between steps, for each number of the rank's gradients.

        Args:
            dim: width of the model, and so the assumed side of its matrices.
        """
        return 0.0

    def why_no_matrices(self, dim: int, width: float) -> str | None:
        """Return why the codec compresses none of the model's matrices; None if it compresses some.

        Args:
            dim: width of the model.
            width: side of a square matrix that a low-rank product shrinks by the same factor as the model's matrices.
        """
        return None


def sparse_bytes(density: float, values: Values) -> float:
    """Return the bytes of a message with the selected numbers, divided by the count of numbers in the gradient. The
    message has the values in the precision `values` and their positions: as a bitmap, as 16 bits each, or as one byte
    for each gap between positions, whichever is smallest. The scales of values in fp16, int8 and sign are left out."""
    return density * VALUE_BYTES[values] + min(1 / 8, 2 * density, max(density, 1 / 255))
