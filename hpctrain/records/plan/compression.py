"""The codecs of gradients, which are the modes of `compression` in run.yaml and of plans, and the mode `auto`, with
which the planner chooses the codec.

The class of a codec states everything about the codec but its kernels: settings, bytes on the wire, state, time on
a device, and where the codec can be used. The checks of a plan, the planner, the bench and the tests read the classes
from `CODECS`.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.gradient_codec import (
    FULL_BYTES,
    RESIDUAL_BYTES,
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
from hpctrain.records.plan.integers import IntegerMode, Quantized
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, LayerGroup
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.plan.rotated import RotatedIntegers, RotatedMode

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


class GroupCodec(Part):
    """The codec of a layer group in mode mixed."""

    mode: Literal["bf16", IntegerMode, RotatedMode]
    """How the gradients of the group are sent: bf16, int8, int4 or rotated integers."""
    layers: LayerGroup
    """The layer group."""
    seed: int | None = Field(default=None, ge=0)
    """With rotated integers: seed of the random signs in the rotation. Default: 0."""

    @field_validator("seed")
    @classmethod
    def _only_of_rotations(cls, seed: int | None, info: ValidationInfo) -> int | None:
        mode = info.data.get("mode")  # None: the mode is an error itself
        if seed is not None and mode is not None and mode not in get_args(RotatedMode):
            raise ValueError(f"mode {mode} has no seed, only rotated integers have one")
        return seed


DenseCodec = NoCompression | Bf16 | Quantized | RotatedIntegers
"""A codec that sends all numbers of a gradient, in buckets."""
_RoundedCodec = Bf16 | Quantized | RotatedIntegers
_ROUNDED_CODEC: TypeAdapter[_RoundedCodec] = TypeAdapter(Annotated[_RoundedCodec, Field(discriminator="mode")])


class Mixed(GradientCodec):
    """Codecs by layer group: the gradients of each group are sent by a codec of its own."""

    may_raise_loss = True

    mode: Literal["mixed"]
    """Each layer group has a codec of its own. Groups without one are summed exactly."""
    groups: tuple[GroupCodec, ...]
    """The codecs, at most one for each layer group: embedding_head, attention and feed_forward."""

    @field_validator("groups")
    @classmethod
    def _one_codec_a_group(cls, groups: tuple[GroupCodec, ...]) -> tuple[GroupCodec, ...]:
        if not groups:
            raise ValueError(f"found none; allowed: a codec for at least one of {', '.join(LAYER_GROUPS)}")
        count = Counter(codec.layers for codec in groups)
        if twice := [group for group in LAYER_GROUPS if count[group] > 1]:
            raise ValueError(f"found {count[twice[0]]} codecs for {twice[0]}; allowed: one for each layer group")
        return groups

    @cached_property
    def codecs(self) -> dict[LayerGroup, Bf16 | Quantized | RotatedIntegers]:
        """Return layer group -> its codec, without the groups that are summed exactly."""
        return {group.layers: _ROUNDED_CODEC.validate_python(group.to_json()) for group in self.groups}

    def codec_of(self, group: LayerGroup) -> DenseCodec:
        """Return the codec of a layer group; that of exact sums if the group has no other one."""
        return self.codecs.get(group, NoCompression())

    @property
    def label(self) -> str:
        return ", ".join(f"{group} {self.codec_of(group).mode}" for group in LAYER_GROUPS)

    @property
    def short_label(self) -> str:
        return self.mode

    @property
    def early_share(self) -> float:
        # Gradients that are summed exactly beside others are sent last.
        return min(codec.overlap for codec in self.codecs.values()) if len(self.codecs) == len(LAYER_GROUPS) else 0.0

    def state_bytes(self, dim: int) -> float:
        return max(codec.state_bytes(dim) for codec in self.codecs.values())


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
"""Classes of all codecs but `Mixed`, which consists of others. Mode auto tries none, bf16, int8 and int4 in this order,
and then the others by the measured gaps of their loss (`candidate_codecs` of the planner)."""
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
