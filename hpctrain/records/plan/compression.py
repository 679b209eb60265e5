"""How gradients are summed over replicas: the modes of `compression` in run.yaml, each with its settings. Those that a
plan may carry, all but `auto`, are the codecs that workers obey."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from hpctrain.records.format.document import Part


def _layers(value: object) -> object:
    """One line for what is neither of the forms, where pydantic would have one for each."""
    if value in ("all", "non_attention") or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("allowed: all, non_attention, or a list of patterns for names of parameters")


Layers = Annotated[Literal["all", "non_attention"] | list[str], BeforeValidator(_layers)]
Selector = Literal["exact", "sampled", "block", "random"]
Feedback = Literal["none", "standard", "decayed", "paper"]
Reset = Literal["none", "zero", "flush"]
Values = Literal["fp32", "fp16", "bf16", "int8", "sign"]
Messages = Literal["none", "bf16", "int8"]
"""How a message between two pipeline stages travels."""

MIN_COMPRESSED_ELEMENTS = 4096
"""Parameters of fewer numbers are always summed exactly; so are those of one dimension."""


class _Compression(Part):
    """What every mode has."""

    activations: Messages | Literal["auto"] | None = None
    """How activations and their gradients travel between pipeline stages on different nodes. none: in fp32; bf16; int8:
    integers of 8 bits with a scale for each 256 of them; auto: the planner chooses none or bf16, with mode auto and
    `lossy` int8 too. Left out: auto with mode auto, else none."""

    @property
    def messages(self) -> Messages | Literal["auto"]:
        """`activations`, where it is left out too."""
        return self.activations or "none"


class NoCompression(_Compression):
    """Exact sums in full precision."""

    mode: Literal["none"] = "none"
    """Exact sums in full precision."""


class Bf16(_Compression):
    """Gradients travel in bfloat16."""

    mode: Literal["bf16"]
    """Gradients travel in bfloat16, half the bytes; each number keeps 8 bits of its mantissa."""
    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*', as 'layers.*.feed_forward.*'. The rest is summed exactly."""


class Quantized(_Compression):
    """Gradients travel as integers of few bits (as in ZeRO++, Wang et al. 2023)."""

    mode: Literal["int8", "int4"]
    """Gradients travel as integers of 8 or of 4 bits, with a scale for each 256 of them; what rounding takes is added
    to the next gradient, and takes as much memory as the gradients."""
    layers: Layers = "all"
    """What is compressed, as in mode bf16."""

    @property
    def bits(self) -> Literal[8, 4]:
        """Of each number."""
        return 8 if self.mode == "int8" else 4


class _Sparse(_Compression):
    """Settings of every mode that sends a choice of the numbers."""

    layers: Layers = "all"
    """What is compressed: all; non_attention: all but attention; or a list of patterns for names of parameters, with
    '*'. The rest is summed exactly."""
    feedback: Feedback = "standard"
    """What becomes of the numbers that are not sent. standard: added to the next gradient. decayed: the same, fading
    by `beta` a step. paper: equation (5) of the paper, word for word. none: lost."""
    beta: float = Field(default=0.9, ge=0, le=1)
    """With feedback decayed or paper: what is left of an unsent number after a step."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision in which unsent numbers are kept; it takes that much memory for each parameter."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""


class TopK(_Sparse):
    """The same share of each layer's numbers, the largest ones."""

    mode: Literal["topk"]
    """The largest numbers of each layer are sent, the same share of each."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    selector: Selector = "sampled"
    """How the largest are found. exact; sampled: by a threshold from a sample, near the wanted count; block: within
    blocks; random: not the largest at all, but the same places on all ranks."""
    values: Values = "bf16"
    """Precision in which they are sent; what rounding takes goes the way of the unsent."""
    reset: Reset = "none"
    """What happens to the unsent every `reset_every` steps. zero: they are dropped. flush: they are sent."""
    reset_every: int = Field(default=1000, ge=1)
    """Steps between two of these."""


class Adaptive(_Sparse):
    """Each layer's share follows the variance of its gradients (section 3.3 of the paper)."""

    mode: Literal["adaptive"]
    """The largest numbers of each layer are sent, more of those layers whose gradients vary more."""
    form: Literal["ours", "paper"] = "ours"
    """ours: the variance of a layer is divided by its size. paper: equation (3) word for word, without that."""
    limits: tuple[float, float] = (0.7, 0.95)
    """Smallest and largest sparsity of a layer: the share that is not sent."""
    mapping: Literal["linear", "log", "rank"] = "linear"
    """From variances to sparsities: linear, by their logarithms, or by their order."""
    selector: Selector = "sampled"
    """As in mode topk."""
    values: Values = "bf16"
    """As in mode topk."""
    warmup_steps: int = Field(default=50, ge=1)
    """Steps at the beginning of a run whose gradients are summed exactly and looked at; the paper takes 50 to 100."""
    reprofile_every: int | None = Field(default=None, ge=1)
    """Steps after which the variances are measured anew. Default: never."""
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
    """The largest numbers as a sketch that can be summed (TAGC, Polyakov et al. 2025)."""

    mode: Literal["tagc"]
    """The largest numbers, folded into a sketch that is summed as it is and unfolded exactly."""
    ratio: Annotated[float, Field(gt=1)] | Literal["auto"] = "auto"
    """How many times smaller than the gradient the sketch is; auto: as small as it can be unfolded."""
    density: float = Field(default=0.05, gt=0, le=1)
    """Share of the numbers that is sent."""
    layers: Layers = "non_attention"
    """What is compressed, as in mode topk."""


class PowerSgd(_Compression):
    """Matrices as products of two thin ones (Vogels et al. 2019)."""

    mode: Literal["power_sgd"]
    """Each matrix is sent as a product of two thin ones; what that leaves out is added to the next gradient."""
    rank: int = Field(default=4, ge=1)
    """Columns of the thin matrices."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the beginning of a run whose gradients are summed exactly."""
    min_compression: float = Field(default=2.0, ge=1)
    """A matrix that would not shrink by this factor is summed exactly."""
    layers: Layers = "all"
    """What is compressed, as in mode topk."""


class LocalSteps(_Compression):
    """Replicas train on their own and meet every few steps (DiLoCo, Douillard et al. 2023)."""

    mode: Literal["local_steps"]
    """Replicas train on their own and add up how far each has come every few steps."""
    every: int = Field(default=10, ge=1)
    """Steps between two meetings."""
    outer_lr: float = Field(default=0.7, gt=0)
    """Share of the mean of the replicas' ways that is gone."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum over the meetings."""


class AutoCompression(_Compression):
    """The planner chooses."""

    mode: Literal["auto"]
    """The planner chooses none, bf16, int8 or int4 by measured links and devices, with `lossy` power_sgd or topk too;
    the plan says why."""
    lossy: bool = False
    """Whether modes may be chosen that leave out most of each gradient. They are faster on slow links, and a model that
    is trained for as many steps with them may have a higher loss (docs/results/compression.md)."""

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
