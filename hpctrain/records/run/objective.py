"""The `objective` section of run.yaml: training objectives, and how many tokens and targets a sample has.

All samples of a run have the same number of targets. So every rank knows by how many targets the loss of a global batch
is divided, before it has seen the batch and whatever the plan.
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
    """The objective next_token: each token is predicted from the tokens before it (Radford et al. 2019)."""

    mode: Literal["next_token"] = "next_token"
    """Every position has a target: the token after it."""


class Masked(Part):
    """The objective masked: some tokens are masked, and predicted from the tokens around them (Devlin et al. 2018,
    section 3.1)."""

    mode: Literal["masked"]
    """Some positions are chosen at random, and only these have a target: their original token."""
    fraction: float = Field(default=0.15, gt=0, le=1)
    """Share of the positions that is chosen; the number of chosen positions is the same in each sample."""
    mask_fraction: float = Field(default=0.8, ge=0, le=1)
    """Share of the chosen positions that becomes the mask token."""
    random_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the chosen positions that becomes a random token of the data's vocabulary. The remaining chosen
    positions keep their token."""

    @model_validator(mode="after")
    def _shares(self) -> Masked:
        if self.mask_fraction + self.random_fraction > 1:
            both = f"{self.mask_fraction:g} and random_fraction {self.random_fraction:g}"
            raise ValueError(f"mask_fraction {both} are more than the whole; lower one of them")
        return self


class SpanCorruption(Part):
    """The objective span_corruption: sentinels replace spans of the encoder's text, and the decoder writes the spans
    (Raffel et al. 2020)."""

    mode: Literal["span_corruption"]
    """The decoder's targets are each sentinel followed by the tokens that it replaced, then the end of text."""
    fraction: float = Field(default=FRACTION, gt=0, le=0.5)
    """Share of the text's tokens that lies in spans, which are removed from the input."""
    mean_span: float = Field(default=MEAN_SPAN, ge=1)
    """Mean number of tokens in a span."""


NEXT_TOKEN = NextToken()
AnyObjective = NextToken | Masked | SpanCorruption
Objective = Annotated[AnyObjective, Field(discriminator="mode")]

_ALLOWED: dict[str, tuple[AnyObjective, ...]] = {
    "decoder": (NEXT_TOKEN, Masked(mode="masked")),
    "gpt2": (NEXT_TOKEN, Masked(mode="masked")),
    "encoder": (Masked(mode="masked"),),
    "encoder_decoder": (SpanCorruption(mode="span_corruption"),),
    "transformers": (NEXT_TOKEN,),
}
"""Model family -> objectives that it can learn, the default first. An encoder cannot learn next_token, because it sees
the next token. Only an encoder-decoder reads one text and writes another, as span_corruption needs."""


def resolved_objective(objective: AnyObjective | None, spec: Spec) -> AnyObjective:
    """Return `objective`, or the default of the model's family if it is None.

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
    """Return the token counts of one training sample with this objective. The model reads `seq_len` tokens of the
    sample; in an encoder-decoder, its encoder reads them.

    Raises:
        InputError: with span corruption, no text has exactly `seq_len` tokens after its spans are replaced.
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
    """Return the token counts of the longest text that span corruption turns into exactly `seq_len` input tokens.

    Raises:
        InputError: there is no such text.
    """
    longest = longest_text(seq_len, objective.fraction, objective.mean_span)
    if longest.inputs != seq_len:
        raise InputError(
            f"data.seq_len: found {seq_len}; no text, corrupted with objective.fraction {objective.fraction:g} and "
            f"mean_span {objective.mean_span:g}, has just as many tokens; make it {seq_len - 1}"
        )
    return longest
