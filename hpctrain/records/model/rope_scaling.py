"""Settings that scale the angles of rotary positions, so that a model takes longer texts than those of its first
training. The names of the modes are those of transformers (`rope_type`).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.records.format.document import SEQ_MAX, Part

_Factor = Annotated[float, Field(gt=0)]


class LinearRope(Part):
    """All angles divided by one number (position interpolation, Chen et al. 2023)."""

    mode: Literal["linear"]
    """How the angles are scaled."""
    factor: float = Field(gt=0)
    """Number by which angles are divided."""


class Llama3Rope(Part):
    """The scaling of Llama 3.1 and later: slow angles are divided, fast ones stay, with a smooth passage between them
    (Grattafiori et al. 2024)."""

    mode: Literal["llama3"]
    """How the angles are scaled."""
    factor: float = Field(gt=0)
    """Number by which the slow angles are divided."""
    low_freq_factor: float = Field(gt=0)
    """Angles that turn fewer times than this over `original_positions` are divided by `factor`."""
    high_freq_factor: float = Field(gt=0)
    """Angles that turn more times than this over `original_positions` stay."""
    original_positions: int = Field(ge=1, le=SEQ_MAX)
    """Tokens of the longest sequence before the scaling."""

    @model_validator(mode="after")
    def _check(self) -> Llama3Rope:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor:g} is not above low_freq_factor")
        return self


class YarnRope(Part):
    """YaRN (Peng et al. 2023): slow angles are divided, fast ones stay, and cosines and sines are multiplied by a
    factor."""

    mode: Literal["yarn"]
    """How the angles are scaled."""
    factor: float = Field(gt=0)
    """Number by which the slow angles are divided."""
    original_positions: int = Field(ge=1, le=SEQ_MAX)
    """Tokens of the longest sequence before the scaling."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Angles that turn more times than this over `original_positions` stay."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Angles that turn fewer times than this over `original_positions` are divided by `factor`."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Number by which cosines and sines are multiplied. Default: 1 + 0.1·ln(`factor`), but 1 with a `factor` below
    1."""
    truncate: bool = True
    """Whether the two bounds between fast and slow angles are rounded to whole numbers. A bound is the index of the
    angle that turns `beta_fast` or `beta_slow` times."""

    @property
    def effective_attention_factor(self) -> float:
        """Return the number by which cosines and sines are multiplied."""
        return self.attention_factor or (1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0)


class LongRope(Part):
    """LongRoPE (Ding et al. 2024), as Phi-3 has it: each angle divided by a number of its own, from one list for
    sequences up to `original_positions` and from another one for longer sequences."""

    mode: Literal["longrope"]
    """How the angles are scaled."""
    short_factor: tuple[_Factor, ...] = Field(max_length=2**16)
    """Number by which each angle is divided in a sequence of at most `original_positions` tokens."""
    long_factor: tuple[_Factor, ...] = Field(max_length=2**16)
    """Number by which each angle is divided in a longer sequence."""
    original_positions: int = Field(ge=1, le=SEQ_MAX)
    """Tokens of the longest sequence that `short_factor` is for."""
    attention_factor: float = Field(default=1.0, gt=0)
    """Number by which cosines and sines are multiplied."""


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope | LongRope, Field(discriminator="mode")]
"""How the angles of rotary positions are scaled."""
