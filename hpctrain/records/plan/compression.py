"""The codecs of gradients, which are the modes of `compression` in run.yaml and of plans, and the mode `auto`, with
which the planner chooses the codec.

The class of a codec states everything about the codec but its kernels: settings, bytes on the wire, state, time on
a device, and where the codec can be used. The checks of a plan, the planner, the bench and the tests read the classes
from `CODECS`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, model_validator

from hpctrain.records.plan.gradient_codec import (
    FULL_BYTES,
    RESIDUAL_BYTES,
    SCALE_BYTES,
    VALUE_BYTES,
    CompressionSettings,
    GradientCodec,
    IntraNode,
    Layers,
    Messages,
    TensorParallelSums,
    Values,
    sparse_bytes,
)
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, LayerGroup
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.plan.rotated import RotatedIntegers

Selector = Literal["exact", "sampled", "block", "random"]
Feedback = Literal["none", "standard", "decayed", "paper"]
Reset = Literal["none", "zero", "flush"]
VarianceForm = Literal["ours", "paper"]
DensityMapping = Literal["linear", "log", "rank"]
IndexForm = Literal["union", "4bit", "1bit"]

MIN_COMPRESSED_ELEMENTS = 4096
"""Fewest elements of a compressed parameter. Smaller parameters and those of one dimension are always summed
exactly."""


class NoCompression(GradientCodec):
    """No compression: gradients are summed exactly, in fp32."""

    exact = True
    has_state = False
    auto_settings = {}
    sharded_sums = "all"
    overlap = 1.0

    mode: Literal["none"] = "none"
    """Gradients are summed exactly, in fp32."""


class Bf16(GradientCodec):
    """Codec that sends gradients in bfloat16."""

    has_state = False
    auto_settings = {}
    sharded_sums = "all"
    overlap = 0.5  # the reduce-scatter; the all-gather follows a few buckets behind
    measured_as = "bf16"
    reduce_scatter_share = 1.0

    mode: Literal["bf16"]
    """Gradients are sent in bfloat16, which halves the bytes; each number keeps 8 significant bits."""
    layers: Layers = "all"
    """Parameters that are compressed. all: all parameters. non_attention: all but those of attention, also of
    cross-attention. non_attention_linear: these and the projection after each attention, as in the paper on TAGC
    (Polyakov et al. 2025). embedding_head, attention, feed_forward: one layer group. Or a list of patterns for names of
    parameters, with '*', such as 'layers.*.feed_forward.*'. Other parameters are summed exactly."""

    @property
    def dense_bytes(self) -> float:
        return VALUE_BYTES["bf16"]

    def all_to_all_share(self, world: int, dim: float) -> float:
        return 0.5


class Quantized(GradientCodec):
    """Codec that sends gradients as integers of 8 or 4 bits (as ZeRO++, Wang et al. 2023)."""

    auto_settings = {}
    sharded_sums = "all"
    overlap = 0.5
    measured_as = "quantized"
    reduce_scatter_share = 0.6  # measured: 0.62 with 8 bits, 0.61 with 4; four ranks, 4 M numbers (torch 2.13)

    mode: Literal["int8", "int4"]
    """Gradients are sent as integers of 8 or 4 bits, with a scale for each 256 of them. The rounding error is added to
    the next gradient; storing it takes as much memory as the gradients."""
    layers: Layers = "all"
    """Parameters that are compressed, as in mode bf16."""

    @property
    def bits(self) -> int:
        """Return the bits of each sent integer, from the name of the mode. The kernels support all widths from 2 to 8
        bits."""
        return int(self.mode.removeprefix("int"))

    @property
    def dense_bytes(self) -> float:
        return self.bits / 8 + SCALE_BYTES

    def all_to_all_share(self, world: int, dim: float) -> float:
        return 0.5

    def state_bytes(self, dim: int) -> float:
        return FULL_BYTES


class _Sparse(GradientCodec):
    """Base class of the codecs that send only some numbers of a gradient."""

    lossy = may_raise_loss = True
    measured_as = "topk"

    layers: Layers = "all"
    """Parameters that are compressed, as in mode bf16."""
    feedback: Feedback = "standard"
    """What happens to numbers that are not sent. standard: they are added to the next gradient. decayed: they are
    multiplied by `beta` and added to the next gradient. paper: the next residual is gradient − sent numbers +
    `beta` · residual, as equation (5) of the paper (Sun 2026) says literally. none: they are lost."""
    beta: float = Field(default=0.9, ge=0, le=1)
    """With feedback decayed or paper: factor on the residual in each step."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision in which unsent numbers are stored: 4 or 2 bytes of memory for each parameter."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""

    def state_bytes(self, dim: int) -> float:
        return 0.0 if self.feedback == "none" else RESIDUAL_BYTES[self.residual]


class _Selected(_Sparse):
    """Base class of the codecs that select some numbers of a gradient and send these numbers with their positions (not
    a sketch of them)."""

    sharded_sums = "selected"
    reduce_scatter_share = 1.0  # numbers are selected once, as in sums of two replicas (`passes`)

    def all_to_all_share(self, world: int, dim: float) -> float:
        return 0.0 if world == 2 else 0.5  # two ranks send all numbers to each other

    def rounds(self, buckets: int, world: int) -> float:
        # First the exempt numbers. Then two ranks exchange sizes and values; more ranks send them to owners and back.
        return 2 if world == 2 else 3

    def passes(self, world: int) -> float:
        return 1 + 1 / world if world > 2 else 1  # with owners, each selects again from the sums of its part


class TopK(_Selected):
    """Codec that sends the largest numbers of each layer, the same share in every layer (Aji, Heafield 2017)."""

    auto_settings = {"density": 0.07}  # the density at which a probe measures devices

    mode: Literal["topk"]
    """The largest numbers of each layer are sent, the same share in every layer."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    selector: Selector = "sampled"
    """How the numbers to send are picked. exact: exactly the largest ones. sampled: those above a threshold from a
    sample, so their count is approximate. block: the largest ones of each block of about 1024 numbers. random: not the
    largest ones, but the same random positions on all ranks."""
    values: Values = "bf16"
    """Precision in which the selected numbers are sent; rounding errors are treated as unsent numbers."""
    reset: Reset = "none"
    """What happens to unsent numbers every `reset_every` steps. zero: they are dropped. flush: they are sent."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two resets."""

    def number_bytes(self, world: int, dim: float) -> float:
        return sparse_bytes(self.density, self.values)


class Adaptive(_Selected):
    """Codec that sends the largest numbers of each layer, more in layers whose gradients have a higher variance
    (section 3.3 of the paper, Sun 2026)."""

    mode: Literal["adaptive"]
    """The largest numbers of each layer are sent, more in layers whose gradients have a higher variance."""
    form: VarianceForm = "ours"
    """How the variance of a layer is computed. ours: divided by the layer's size. paper: literally equation (3) of the
    paper (Sun 2026), which does not divide by the size."""
    limits: tuple[float, float] = (0.7, 0.95)
    """Smallest and largest sparsity of a layer: the share that is not sent."""
    mapping: DensityMapping = "linear"
    """How the variance of a layer determines its sparsity. linear: by the variance. log: by the variance's logarithm.
    rank: by the layer's position among all layers in order of variance."""
    selector: Selector = "sampled"
    """How the largest numbers are found, as in mode topk."""
    values: Values = "bf16"
    """Precision in which the selected numbers are sent, as in mode topk."""
    warmup_steps: int = Field(default=50, ge=1)
    """Steps at the beginning of a run whose gradients are summed exactly and whose variances are measured; the paper
    (Sun 2026) uses 50 to 100."""
    reprofile_every: int | None = Field(default=None, ge=1)
    """Steps after which the variances are measured again. Default: never."""
    reset: Reset = "none"
    """What happens to unsent numbers every `reset_every` steps, as in mode topk; the paper (Sun 2026) drops them every
    1000 steps."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two resets."""

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> Adaptive:
        low, high = self.limits
        if not 0 <= low <= high < 1:
            raise ValueError(
                f"limits: found [{low}, {high}]; allowed: two numbers from 0 to below 1, the smaller first"
            )
        return self

    def number_bytes(self, world: int, dim: float) -> float:
        # The layers' densities between the limits are known only after profiling, so the middle is assumed.
        return sparse_bytes(1 - sum(self.limits) / 2, self.values)

    def state_bytes(self, dim: int) -> float:
        # A mean of the gradients is kept while variances are measured.
        return FULL_BYTES + super().state_bytes(dim)


class Tagc(_Sparse):
    """Codec TAGC (Polyakov et al. 2025): the ranks agree on an index of their largest numbers, and sum a count sketch
    of these numbers or, with ratio auto, a list of them."""

    sharded_sums = "selected"
    later_fields = frozenset({"index"})

    mode: Literal["tagc"]
    """The ranks agree on an index of their largest numbers and sum these numbers, as integers. Numbers that cannot be
    decoded from the sum of the sketches count as unsent."""
    index: IndexForm = "union"
    """How the ranks agree on the positions of the sent numbers. union: a bit for each number; ranks take all positions
    that any of them sends. 4bit, 1bit: as published, a sum over the ranks of 4 bits or 1 bit for each number. With
    1bit, positions that two ranks send are lost, and numbers near them are wrong. These two need a number as
    `ratio`."""
    ratio: Annotated[float, Field(gt=1)] | Literal["auto"] = "auto"
    """Count of numbers in the compressed gradients divided by the count of numbers in the sketch. auto: no sketch; a
    list with one number for each position in the index is sent instead."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers of each compressed gradient that a rank sends."""
    layers: Layers = "non_attention"
    """Parameters that are compressed, as in mode bf16."""

    @model_validator(mode="after")
    def _published_index_has_a_sketch(self) -> Tagc:
        if self.index != "union" and self.ratio == "auto":
            raise ValueError(f"index: found {self.index} with ratio auto; allowed: union, or a number as `ratio`")
        return self

    def number_bytes(self, world: int, dim: float) -> float:
        # With auto, a number for each position that any rank sends; fewer where ranks select the same positions.
        share = min(1.0, self.density * world) if self.ratio == "auto" else 1 / self.ratio
        return FULL_BYTES * share + self._index_bytes

    def beside_share(self, world: int) -> float:
        # Ranks agree on the index first. With a sketch and the union, they then tell each other what they have decoded.
        waits = self.ratio != "auto" and self.index == "union"
        return 0.0 if waits else 1 - self._index_bytes / self.number_bytes(world, 0)

    @property
    def _index_bytes(self) -> float:
        """Return the bytes of the index for each number of the gradient."""
        return 1 / 2 if self.index == "4bit" else 1 / 8

    def all_to_all_share(self, world: int, dim: float) -> float:
        # Only the union's bitmaps go to owners and back; sums of bits and of numbers are all-reduces.
        return 0.5 * (1 / 8) / self.number_bytes(world, dim) if self.index == "union" else 0.0

    def rounds(self, buckets: int, world: int) -> float:
        return 3  # exempt numbers, the index, the values


_GroupCodec = Annotated[Bf16 | Quantized | RotatedIntegers, Field(discriminator="mode")]


class Mixed(GradientCodec):
    """Codecs by layer group: the gradients of each group are sent by a codec of its own."""

    may_raise_loss = True

    mode: Literal["mixed"]
    """Each layer group has a codec of its own. Groups without one are summed exactly."""
    groups: tuple[_GroupCodec, ...]
    """The codecs: bf16, int8, int4 or rotated integers, with their settings. `layers` of each is another layer group:
    embedding_head, attention or feed_forward."""

    @model_validator(mode="after")
    def _each_has_a_layer_group(self) -> Mixed:
        if not self.groups:
            raise ValueError(f"groups: found none; allowed: a codec for at least one of {', '.join(LAYER_GROUPS)}")
        used = [codec.layers for codec in self.groups]
        for number, codec in enumerate(self.groups):
            if codec.layers not in LAYER_GROUPS or codec.layers in used[:number]:
                raise ValueError(
                    f"groups[{number}].layers: found {codec.layers}; allowed: {', '.join(LAYER_GROUPS)}, each once"
                )
            if codec.activations or codec.intra_node or codec.tensor_parallel:
                raise ValueError(
                    f"groups[{number}]: found activations, intra_node or tensor_parallel; these are no settings of a "
                    "layer group; write them beside groups"
                )
        return self

    def codec_of(self, group: LayerGroup) -> NoCompression | Bf16 | Quantized | RotatedIntegers:
        """Return the codec of a layer group."""
        return next((codec for codec in self.groups if codec.layers == group), NoCompression())

    @property
    def label(self) -> str:
        return ", ".join(f"{group} {self.codec_of(group).mode}" for group in LAYER_GROUPS)

    @property
    def early_share(self) -> float:
        # Gradients that are summed exactly beside others are sent last.
        return min(codec.overlap for codec in self.groups) if len(self.groups) == len(LAYER_GROUPS) else 0.0

    def state_bytes(self, dim: int) -> float:
        return max(codec.state_bytes(dim) for codec in self.groups)


class AutoCompression(CompressionSettings):
    """Mode auto: the planner chooses the codec."""

    mode: Literal["auto"]
    """The planner chooses none, bf16, int8 or int4 by the measured links and devices; with `lossy` or `loss_budget`,
    also rotated integers, power_sgd or topk; in a run whose gradients were measured, also adaptive. The plan
    states the reason."""
    lossy: bool = False
    """Whether the planner may choose each of these modes, also those that leave out most of each gradient. They are
    faster on slow links, but after the same number of steps the loss may be higher (`hpctrain docs
    results/compression`)."""
    loss_budget: float = Field(default=0, ge=0, lt=1)
    """Share by which the validation loss may exceed that of exact sums after the same number of steps, as 0.01 for 1 %.
    The planner may then choose each mode whose measured gap is at most this large (`hpctrain docs
    results/compression`). Default: 0, only none, bf16, int8 and int4, whatever was measured of others. Not with `lossy:
    true`, which sets no limit."""

    @model_validator(mode="after")
    def _one_limit(self) -> AutoCompression:
        if self.lossy and self.loss_budget:
            raise ValueError(
                f"loss_budget: found {self.loss_budget:g} with lossy: true, which sets no limit; give one of them"
            )
        return self

    @property
    def loss_limit(self) -> float:
        """Return the largest allowed gap of the loss, as a share; infinity with `lossy: true`."""
        return math.inf if self.lossy else self.loss_budget

    @property
    def messages(self) -> Messages | Literal["auto"]:
        return self.activations or "auto"

    @property
    def node_sums(self) -> IntraNode | Literal["auto"]:
        return self.intra_node or "auto"

    @property
    def tensor_sums(self) -> TensorParallelSums | Literal["auto"]:
        return self.tensor_parallel or "auto"


_OneCodec = NoCompression | Bf16 | Quantized | RotatedIntegers | PowerSgd | TopK | Adaptive | Tagc | LocalSteps
Codec = Annotated[_OneCodec | Mixed, Field(discriminator="mode")]
Compression = Annotated[_OneCodec | Mixed | AutoCompression, Field(discriminator="mode")]

CODECS: tuple[type[GradientCodec], ...] = get_args(_OneCodec)
"""Classes of all codecs but `Mixed`, which consists of others. Mode auto tries its codecs in this order: none, bf16,
int8, int4, rotated integers of 4, 3 and 2 bits, power_sgd, topk; then, if gradients were measured, adaptive."""
MODES: dict[str, type[GradientCodec]] = {mode: codec for codec in CODECS for mode in codec.modes()}
"""Value of `compression.mode` -> class of the codec."""
_ADAPTER: TypeAdapter[Codec] = TypeAdapter(Codec)


def make_codec(settings: dict[str, Any]) -> Codec:
    """Return the codec for settings in the form of the section `compression` of run.yaml.

    Raises:
        ValueError: the settings have errors, or their mode is auto, which is no codec.
    """
    return _ADAPTER.validate_python(settings)


BUCKET_BYTES = 8 * 2**20
"""Size of a gradient bucket in bytes: large enough for the full bandwidth, and small enough for the first buckets to be
sent early in the backward pass."""
