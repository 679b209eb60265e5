"""The modes of `compression` in run.yaml, each with its settings. All but `auto` are also the codecs of a plan, which
the workers use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from hpctrain.records.format.document import Part


def _layers(value: object) -> object:
    """Return the value if it is of an allowed form. Otherwise one error is reported, not pydantic's one per form."""
    if value in ("all", "non_attention") or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("allowed: all, non_attention, or a list of patterns for names of parameters")


Layers = Annotated[Literal["all", "non_attention"] | list[str], BeforeValidator(_layers)]
Selector = Literal["exact", "sampled", "block", "random"]
Feedback = Literal["none", "standard", "decayed", "paper"]
Reset = Literal["none", "zero", "flush"]
Values = Literal["fp32", "fp16", "bf16", "int8", "sign"]
Messages = Literal["none", "bf16", "int8"]
"""Encoding of a message between two pipeline stages."""

MIN_COMPRESSED_ELEMENTS = 4096
"""Parameters of fewer numbers are always summed exactly; so are those of one dimension."""


class _Compression(Part):
    """Settings of every mode."""

    activations: Messages | Literal["auto"] | None = None
    """How activations and their gradients are sent between pipeline stages on different nodes. none: in fp32. bf16.
    int8: integers of 8 bits with a scale for each 256 of them. auto: the planner chooses none or bf16, or int8 with
    mode auto and `lossy`. Default: auto with mode auto, else none."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        """The value of `activations`, or its default where it is left out."""
        return self.activations or "none"


class NoCompression(_Compression):
    """Exact sums in full precision."""

    mode: Literal["none"] = "none"
    """Exact sums in full precision."""


class Bf16(_Compression):
    """Gradients are sent in bfloat16."""

    mode: Literal["bf16"]
    """Gradients are sent in bfloat16, half the bytes; each number keeps 8 bits of its mantissa."""
    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*', as 'layers.*.feed_forward.*'. The rest is summed exactly."""


class Quantized(_Compression):
    """Gradients are sent as integers of few bits (as in ZeRO++, Wang et al. 2023)."""

    mode: Literal["int8", "int4"]
    """Gradients are sent as integers of 8 or 4 bits, with a scale for each 256 of them. The rounding error is added to
    the next gradient, and takes as much memory as the gradients."""
    layers: Layers = "all"
    """What is compressed, as in mode bf16."""

    @property
    def bits(self) -> Literal[8, 4]:
        """Bits of each number."""
        return 8 if self.mode == "int8" else 4


class _Sparse(_Compression):
    """Settings of every mode that sends only some of the numbers."""

    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*'. The rest is summed exactly."""
    feedback: Feedback = "standard"
    """What happens to numbers that are not sent. standard: they are added to the next gradient. decayed: the same, but
    multiplied by `beta` each step. paper: equation (5) of the paper, literally. none: they are lost."""
    beta: float = Field(default=0.9, ge=0, le=1)
    """With feedback decayed or paper: factor on an unsent number per step."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision of the unsent numbers; they take that much memory for each parameter."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""


class TopK(_Sparse):
    """The largest numbers of each layer are sent, the same share of each (Aji, Heafield 2017)."""

    mode: Literal["topk"]
    """The largest numbers of each layer are sent, the same share of each."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    selector: Selector = "sampled"
    """How the largest are found. exact. sampled: by a threshold from a sample, so the count is approximate. block:
    within blocks. random: not the largest, but the same random positions on all ranks."""
    values: Values = "bf16"
    """Precision in which they are sent; rounding errors are treated as unsent numbers."""
    reset: Reset = "none"
    """What happens to unsent numbers every `reset_every` steps. zero: they are dropped. flush: they are sent."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two of these."""


class Adaptive(_Sparse):
    """The share that is sent follows the variance of each layer's gradients (section 3.3 of the paper)."""

    mode: Literal["adaptive"]
    """The largest numbers of each layer are sent, more of layers whose gradients vary more."""
    form: Literal["ours", "paper"] = "ours"
    """ours: the variance of a layer is divided by its size. paper: equation (3) literally, without that division."""
    limits: tuple[float, float] = (0.7, 0.95)
    """Smallest and largest sparsity of a layer: the share that is not sent."""
    mapping: Literal["linear", "log", "rank"] = "linear"
    """How variances map to sparsities: linear, log (by their logarithms), or rank (by their order)."""
    selector: Selector = "sampled"
    """As in mode topk."""
    values: Values = "bf16"
    """As in mode topk."""
    warmup_steps: int = Field(default=50, ge=1)
    """Steps at the beginning of a run whose gradients are summed exactly and measured; the paper uses 50 to 100."""
    reprofile_every: int | None = Field(default=None, ge=1)
    """Steps after which the variances are measured again. Default: never."""
    reset: Reset = "none"
    """As in mode topk; the paper zeroes every 1000 steps."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two of these."""

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> Adaptive:
        low, high = self.limits
        if not 0 <= low <= high < 1:
            raise ValueError(
                f"limits: found [{low}, {high}]; allowed: two numbers from 0 to below 1, the smaller first"
            )
        return self


class Tagc(_Sparse):
    """The largest numbers are sent as a sketch that can be summed (TAGC, Polyakov et al. 2025)."""

    mode: Literal["tagc"]
    """The largest numbers are folded into a sketch, which is summed without decoding and unfolded exactly."""
    ratio: Annotated[float, Field(gt=1)] | Literal["auto"] = "auto"
    """How many times smaller than the gradient the sketch is; auto: as small as unfolding allows."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    layers: Layers = "non_attention"
    """What is compressed, as in mode topk."""


class PowerSgd(_Compression):
    """Matrices are sent as products of two thin matrices (Vogels et al. 2019)."""

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


class LocalSteps(_Compression):
    """Replicas train on their own and combine their weights every few steps (DiLoCo, Douillard et al. 2023)."""

    mode: Literal["local_steps"]
    """Replicas train on their own and combine their weight changes every few steps (outer sync)."""
    every: int = Field(default=10, ge=1)
    """Steps between two outer syncs."""
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer: factor on the mean of the replicas' weight changes."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""


class AutoCompression(_Compression):
    """The planner chooses the mode."""

    mode: Literal["auto"]
    """The planner chooses none, bf16, int8 or int4 by measured links and devices, with `lossy` also power_sgd or topk;
    the plan says why."""
    lossy: bool = False
    """Whether the planner may choose modes that leave out most of each gradient. They are faster on slow links, but
    after the same number of steps the loss may be higher (docs/results/compression.md)."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        return self.activations or "auto"


Codec = Annotated[
    NoCompression | Bf16 | Quantized | TopK | Adaptive | Tagc | PowerSgd | LocalSteps,
    Field(discriminator="mode"),
]
Compression = Annotated[
    NoCompression | Bf16 | Quantized | TopK | Adaptive | Tagc | PowerSgd | LocalSteps | AutoCompression,
    Field(discriminator="mode"),
]
