"""Training objectives, and the numbers of tokens and targets in a sample of each.

Every sample of a run has the same number of targets, so every rank knows the divisor of a global batch's mean loss in
advance, whatever the plan.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.base.errors import InputError
from hpctrain.records.format.document import Part
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.model.span_corruption import FRACTION, MEAN_SPAN, Lengths, longest_text


class NextToken(Part):
    """Each token is predicted from the tokens before it (Radford et al. 2019)."""

    mode: Literal["next_token"] = "next_token"
    """Every position has a target: the token after it."""


class Masked(Part):
    """Some tokens are masked and predicted from the tokens around them (Devlin et al. 2018, section 3.1)."""

    mode: Literal["masked"]
    """Only the chosen positions have a target: their original token."""
    fraction: float = Field(default=0.15, gt=0, le=1)
    """Share of the positions that is chosen; the number is the same in each sample."""
    mask_fraction: float = Field(default=0.8, ge=0, le=1)
    """Share of the chosen positions that becomes the mask token."""
    random_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the chosen positions that becomes a random token of the data; the rest stays unchanged."""

    @model_validator(mode="after")
    def _shares(self) -> Masked:
        if self.mask_fraction + self.random_fraction > 1:
            both = f"{self.mask_fraction:g} and random_fraction {self.random_fraction:g}"
            raise ValueError(f"mask_fraction {both} are more than the whole; lower one of them")
        return self


class SpanCorruption(Part):
    """Each span of the input is replaced by a sentinel, and the decoder writes the spans (Raffel et al. 2020)."""

    mode: Literal["span_corruption"]
    """The decoder's targets are each sentinel followed by the tokens that it replaced, then the end of text."""
    fraction: float = Field(default=FRACTION, gt=0, le=0.5)
    """Share of the tokens that is taken out."""
    mean_span: float = Field(default=MEAN_SPAN, ge=1)
    """Tokens in a span, on average."""


NEXT_TOKEN = NextToken()
AnyObjective = NextToken | Masked | SpanCorruption
Objective = Annotated[AnyObjective, Field(discriminator="mode")]

_ALLOWED: dict[str, tuple[AnyObjective, ...]] = {
    "decoder": (NEXT_TOKEN, Masked(mode="masked")),
    "gpt2": (NEXT_TOKEN, Masked(mode="masked")),
    "encoder": (Masked(mode="masked"),),
    "encoder_decoder": (SpanCorruption(mode="span_corruption"),),
}
"""Objectives by model family, the default first. A model that sees the tokens after a position learns nothing from
predicting them; only an encoder-decoder reads one text and writes another."""


def resolved_objective(objective: AnyObjective | None, spec: Spec) -> AnyObjective:
    """Return the given objective, else the default of the model's family.

    Raises:
        InputError: a model of this family cannot learn the objective.
    """
    # An imported model may be a decoder or an encoder; it is no encoder-decoder.
    family = "decoder" if isinstance(spec, ImportedSpec) else spec.family
    allowed = _ALLOWED[family]
    if objective is None:
        return allowed[0]
    if objective.mode not in [item.mode for item in allowed]:
        kinds = " or ".join(item.mode for item in allowed)
        raise InputError(f"objective.mode: found {objective.mode}; a model of the family {family} learns {kinds}")
    return objective


@cache
def lengths(objective: AnyObjective, seq_len: int) -> Lengths:
    """Return the token counts of a sample.

    Raises:
        InputError: no text has exactly `seq_len` tokens after its spans are replaced.
    """
    match objective:
        case NextToken():
            return Lengths(seq_len, seq_len, seq_len, seq_len)
        case Masked():
            chosen = max(1, round(objective.fraction * seq_len))
            return Lengths(seq_len, seq_len, seq_len, chosen)
        case SpanCorruption():
            return _span_lengths(objective, seq_len)


def _span_lengths(objective: SpanCorruption, seq_len: int) -> Lengths:
    """Return the token counts of the text whose corrupted form has exactly `seq_len` tokens."""
    longest = longest_text(seq_len, objective.fraction, objective.mean_span)
    if longest.inputs != seq_len:
        raise InputError(
            f"data.seq_len: found {seq_len}; no text, corrupted with objective.fraction {objective.fraction:g} and "
            f"mean_span {objective.mean_span:g}, has just as many tokens; make it {seq_len - 1}"
        )
    return longest
