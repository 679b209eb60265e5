"""What a model learns from a window of text, and how many tokens of which kind a sample of it has.

Every sample of a run has the same number of targets, so that the mean over a global batch has a divisor that every rank
knows beforehand, whatever the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.base.errors import InputError
from hpctrain.records.format.document import Part
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.model.span_corruption import FRACTION, MEAN_SPAN, longest_text


class NextToken(Part):
    """Each token is predicted from those before it (Radford et al. 2019)."""

    mode: Literal["next_token"] = "next_token"
    """Every position has a target: the token after it."""


class Masked(Part):
    """Some tokens are hidden and predicted from those around them (Devlin et al. 2018, section 3.1)."""

    mode: Literal["masked"]
    """Only the chosen positions have a target: what stood there."""
    fraction: float = Field(default=0.15, gt=0, le=1)
    """Share of the positions that is chosen, the same number in each sample."""
    mask_fraction: float = Field(default=0.8, ge=0, le=1)
    """Of the chosen positions, the share that becomes the mask token."""
    random_fraction: float = Field(default=0.1, ge=0, le=1)
    """Of the chosen positions, the share that becomes any token of the data; the rest stays as it is."""

    @model_validator(mode="after")
    def _shares(self) -> Masked:
        if self.mask_fraction + self.random_fraction > 1:
            both = f"{self.mask_fraction:g} and random_fraction {self.random_fraction:g}"
            raise ValueError(f"mask_fraction {both} are more than the whole; lower one of them")
        return self


class SpanCorruption(Part):
    """Spans of the input are replaced by one sentinel each and written out by the decoder (Raffel et al. 2020)."""

    mode: Literal["span_corruption"]
    """The decoder's targets: each sentinel with the tokens that it stands for, then the end of text."""
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
"""By the model's family, the default first. A model that sees what is after a position learns nothing from having to
name it; only one with two stacks reads one text and writes another."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of one sample."""

    raw: int
    """Taken from the corpus."""
    inputs: int
    """Read by the model, by its encoder where there are two stacks: data.seq_len."""
    outputs: int
    """Positions that the model gives logits for; with two stacks those of the decoder."""
    targets: int
    """Of them, positions with a target."""
    spans: int = 0
    """Sentinels."""


def resolved_objective(objective: AnyObjective | None, spec: Spec) -> AnyObjective:
    """The objective as given, else that of the model's family.

    Raises:
        InputError: a model of this family cannot learn it.
    """
    # A person's own model may be of either kind; it has one stack.
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
    """How long the parts of a sample are.

    Raises:
        InputError: no text becomes just as long as `seq_len` by having spans taken out.
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
    """One token of text more makes the input one longer or not at all, so it is filled to its last place."""
    found = longest_text(seq_len, objective.fraction, objective.mean_span)
    if found.inputs != seq_len:
        raise InputError(
            f"data.seq_len: found {seq_len}; no text, corrupted with objective.fraction {objective.fraction:g} and "
            f"mean_span {objective.mean_span:g}, has just as many tokens; make it {seq_len - 1}"
        )
    return Lengths(found.raw, found.inputs, found.outputs, found.outputs, found.spans)
