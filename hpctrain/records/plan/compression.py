"""The modes of `compression` in run.yaml, and the codec of a plan. All modes but `auto` are also codecs.

A codec's class states everything about it but its kernels: settings, bytes on the wire, state, processor time, and
where it can be used. The checks of a plan, the planner, the bench and the tests read these classes from `CODECS`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.plan.gradient_codec import (
    FULL_BYTES,
    RESIDUAL_BYTES,
    SCALE_BYTES,
    VALUE_BYTES,
    CompressionSettings,
    GradientCodec,
    Messages,
    Values,
    sparse_bytes,
)


def _layers(value: object) -> object:
    """Return the value of `layers` if it has an allowed form; else raise one error, in place of pydantic's one per
    form."""
    if value in ("all", "non_attention") or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("allowed: all, non_attention, or a list of patterns for names of parameters")


Layers = Annotated[Literal["all", "non_attention"] | list[str], BeforeValidator(_layers)]
Selector = Literal["exact", "sampled", "block", "random"]
Feedback = Literal["none", "standard", "decayed", "paper"]
Reset = Literal["none", "zero", "flush"]
VarianceForm = Literal["ours", "paper"]
DensityMapping = Literal["linear", "log", "rank"]

MIN_COMPRESSED_ELEMENTS = 4096
"""Fewest elements of a compressed parameter: smaller ones, and those of one dimension, are always summed exactly."""


class NoCompression(GradientCodec):
    """Exact sums in full precision."""

    exact = True
    has_state = False
    auto_settings = {}
    sharded_sums = "all"
    overlap = 1.0

    mode: Literal["none"] = "none"
    """Exact sums in full precision."""


class Bf16(GradientCodec):
    """Gradients are sent in bfloat16."""

    has_state = False
    auto_settings = {}
    sharded_sums = "all"
    all_to_all = True
    overlap = 0.5  # the reduce-scatter; the all-gather follows a few buckets behind
    measured_as = "bf16"
    reduce_scatter_share = 1.0

    mode: Literal["bf16"]
    """Gradients are sent in bfloat16, half the bytes; each number keeps 8 bits of its mantissa."""
    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*', as 'layers.*.feed_forward.*'. The rest is summed exactly."""

    @property
    def dense_bytes(self) -> float:
        return VALUE_BYTES["bf16"]


class Quantized(GradientCodec):
    """Gradients are sent as integers of few bits (as in ZeRO++, Wang et al. 2023)."""

    auto_settings = {}
    sharded_sums = "all"
    all_to_all = True
    overlap = 0.5
    measured_as = "quantized"
    reduce_scatter_share = 0.6  # measured: 0.62 with 8 bits, 0.61 with 4; four ranks, 4 M numbers (torch 2.13)

    mode: Literal["int8", "int4"]
    """Gradients are sent as integers of that many bits, with a scale for each 256 of them. The rounding error is added
    to the next gradient; storing it takes as much memory as the gradients."""
    layers: Layers = "all"
    """What is compressed, as in mode bf16."""

    @property
    def bits(self) -> int:
        """Bits of each number, from the mode's name. The kernels support all widths from 2 to 8."""
        return int(self.mode.removeprefix("int"))

    @property
    def dense_bytes(self) -> float:
        return self.bits / 8 + SCALE_BYTES

    def state_bytes(self, dim: int) -> float:
        return FULL_BYTES


class _Sparse(GradientCodec):
    """Base class of the codecs that send only some of the numbers of a gradient."""

    lossy = True
    measured_as = "topk"

    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*'. The rest is summed exactly."""
    feedback: Feedback = "standard"
    """What happens to numbers that are not sent. standard: they are added to the next gradient. decayed: they are
    multiplied by `beta` and added to the next gradient. paper: equation (5) of the paper that hpctrain implements,
    literally. none: they are lost."""
    beta: float = Field(default=0.9, ge=0, le=1)
    """With feedback decayed or paper: factor on an unsent number per step."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision in which unsent numbers are stored: 4 or 2 bytes of memory for each parameter."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""

    def state_bytes(self, dim: int) -> float:
        return 0.0 if self.feedback == "none" else RESIDUAL_BYTES[self.residual]


class _Selected(_Sparse):
    """Base class of the codecs that send the selected numbers themselves (not a sketch of them), with their
    positions."""

    sharded_sums = "selected"
    all_to_all = True

    def rounds(self, buckets: int, world: int) -> float:
        return 2 if world == 2 else 3  # exempt numbers; sizes and values, to all at once or to owners and back

    def passes(self, world: int) -> float:
        return 1 + 1 / world if world > 2 else 1  # then owners select again from the sums of their part


class TopK(_Selected):
    """The largest numbers of each layer are sent, the same share in every layer (Aji, Heafield 2017)."""

    auto_settings = {"density": 0.07}  # the density at which a probe measures devices

    mode: Literal["topk"]
    """The largest numbers of each layer are sent, the same share in every layer."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    selector: Selector = "sampled"
    """How the largest are found. exact. sampled: by a threshold from a sample, so the count is approximate. block:
    within blocks. random: not the largest, but the same random positions on all ranks."""
    values: Values = "bf16"
    """Precision in which the selected numbers are sent; rounding errors are treated as unsent numbers."""
    reset: Reset = "none"
    """What happens to unsent numbers every `reset_every` steps. zero: they are dropped. flush: they are sent."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two resets."""

    def number_bytes(self, world: int, dim: float) -> float:
        return sparse_bytes(self.density, self.values)


class Adaptive(_Selected):
    """The largest numbers of each layer are sent; their share follows the variance of the layer's gradients (section
    3.3 of the paper that hpctrain implements)."""

    mode: Literal["adaptive"]
    """The largest numbers of each layer are sent, more of layers whose gradients vary more."""
    form: VarianceForm = "ours"
    """ours: the variance of a layer is divided by its size. paper: equation (3) literally, without that division."""
    limits: tuple[float, float] = (0.7, 0.95)
    """Smallest and largest sparsity of a layer: the share that is not sent."""
    mapping: DensityMapping = "linear"
    """How a layer's variance maps to its sparsity: linear, log (by its logarithm), or rank (by its place among all
    layers)."""
    selector: Selector = "sampled"
    """How the largest numbers are found, as in mode topk."""
    values: Values = "bf16"
    """Precision in which the selected numbers are sent, as in mode topk."""
    warmup_steps: int = Field(default=50, ge=1)
    """Steps at the beginning of a run whose gradients are summed exactly and measured; the paper uses 50 to 100."""
    reprofile_every: int | None = Field(default=None, ge=1)
    """Steps after which the variances are measured again. Default: never."""
    reset: Reset = "none"
    """What happens to unsent numbers every `reset_every` steps, as in mode topk; the paper drops them every 1000
    steps."""
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
    """TAGC: the largest numbers are sent as a sketch, and sketches of several ranks can be summed (Polyakov et al.
    2025)."""

    mode: Literal["tagc"]
    """The largest numbers are folded into a sketch, which is summed without decoding and unfolded exactly."""
    ratio: Annotated[float, Field(gt=1)] | Literal["auto"] = "auto"
    """Size of the gradient divided by the size of the sketch; auto: the largest ratio with which the sketch can still
    be unfolded."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    layers: Layers = "non_attention"
    """What is compressed, as in mode topk."""

    def number_bytes(self, world: int, dim: float) -> float:
        # With auto, a number for each position that any rank sends; fewer where ranks select the same positions.
        share = min(1.0, self.density * world) if self.ratio == "auto" else 1 / self.ratio
        # Each rank's bitmap of positions goes to every other rank.
        return FULL_BYTES * share + world / 16

    def rounds(self, buckets: int, world: int) -> float:
        return 3  # exempt numbers, the index, the values


class PowerSgd(GradientCodec):
    """Matrices are sent as products of two thin matrices (Vogels et al. 2019)."""

    lossy = True
    auto_settings = {}
    measured_as = "power_sgd"

    mode: Literal["power_sgd"]
    """Each matrix is sent as a product of two thin ones; the approximation error is added to the next gradient."""
    rank: int = Field(default=4, ge=1)
    """Columns of the thin matrices."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""
    min_compression: float = Field(default=2.0, ge=1)
    """A matrix that would not shrink by this factor is summed exactly."""
    layers: Layers = "all"
    """What is compressed, as in mode topk."""

    def number_bytes(self, world: int, dim: float) -> float:
        # Of an m × n matrix r·(m+n) numbers are sent, here for m = n = dim: the most with a side of that width.
        return FULL_BYTES * min(1.0, 2.0 * self.rank / dim)

    def rounds(self, buckets: int, world: int) -> float:
        return 2  # the factors, one after the other; what is exempt travels with the first

    def state_bytes(self, dim: int) -> float:
        # Besides the residual: both factors, and the initial directions, to which a reset returns.
        return FULL_BYTES * (1 + 3 * self.rank / dim)

    def why_no_matrices(self, dim: int, width: float) -> str | None:
        if 2 * self.rank * self.min_compression <= width:
            return None
        return f"a matrix of a width of {dim} does not shrink to 1/{self.min_compression:g}"


class LocalSteps(GradientCodec):
    """Replicas train on their own and combine their weights every few steps (DiLoCo, Douillard et al. 2023)."""

    sums_gradients = False

    mode: Literal["local_steps"]
    """Replicas train on their own and combine their weight changes every few steps (outer sync)."""
    every: int = Field(default=10, ge=1)
    """Steps between two outer syncs."""
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer: factor on the mean of the replicas' weight changes."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""

    def number_bytes(self, world: int, dim: float) -> float:
        return FULL_BYTES / self.every

    def rounds(self, buckets: int, world: int) -> float:
        return buckets / self.every

    def passes(self, world: int) -> float:
        return 1 / self.every

    def state_bytes(self, dim: int) -> float:
        return 2 * FULL_BYTES  # the weights at the last outer sync, and the outer velocity


class AutoCompression(CompressionSettings):
    """The planner chooses the mode."""

    mode: Literal["auto"]
    """The planner chooses none, bf16 or integers by the measured links and devices; with `lossy`, also power_sgd or
    topk. The plan gives the reason."""
    lossy: bool = False
    """Whether the planner may choose modes that leave out most of each gradient. They are faster on slow links, but
    after the same number of steps the loss may be higher (docs/results/compression.md)."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        return self.activations or "auto"


_AnyCodec = NoCompression | Bf16 | Quantized | PowerSgd | TopK | Adaptive | Tagc | LocalSteps
Codec = Annotated[_AnyCodec, Field(discriminator="mode")]
Compression = Annotated[_AnyCodec | AutoCompression, Field(discriminator="mode")]

CODECS: tuple[type[GradientCodec], ...] = get_args(_AnyCodec)
"""All codecs. Those that mode auto chooses from are in order, the least lossy first."""
MODES: dict[str, type[GradientCodec]] = {mode: codec for codec in CODECS for mode in codec.modes()}
"""Value of `compression.mode` -> class of its codec."""
_ADAPTER: TypeAdapter[Codec] = TypeAdapter(Codec)


def make_codec(settings: dict[str, Any]) -> Codec:
    """Return the codec for settings as written under `compression` in run.yaml."""
    return _ADAPTER.validate_python(settings)


BUCKET_BYTES = 8 * 2**20
"""Size of a gradient bucket in bytes: large enough for full bandwidth, small enough for the first buckets to be sent
early."""


class CodecFigures(Part):
    """The planner's prediction for one codec, on the pipeline rank whose all-reduce takes longest."""

    codec: Codec
    """The codec with its settings."""
    sent_bytes: float | None = None
    """Bytes that a device sends in a step, after the warm-up steps."""
    wire_s: float | None = None
    """Seconds of the messages on the slowest link: their number times alpha plus their bytes times beta."""
    processor_s: float | None = None
    """Seconds of selecting, encoding, decoding and copying numbers on the device."""
    hidden_s: float | None = None
    """Part of `wire_s` that overlaps the backward pass, seconds."""
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


NO_COMPRESSION_CODEC = CodecSpec()
