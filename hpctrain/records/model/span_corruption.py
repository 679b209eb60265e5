"""Token counts of a training sample. With the objective span corruption, they follow from the length of the text, whose
spans are replaced by sentinels (Raffel et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

FRACTION, MEAN_SPAN = 0.15, 3.0
"""Defaults of span corruption: share of the text's tokens that lies in spans, and mean number of tokens in a span."""


@dataclass(frozen=True)
class Lengths:
    """Token counts of one training sample. With span corruption, inputs and outputs each include an end-of-text
    token."""

    raw: int
    """Tokens taken from the corpus."""
    inputs: int
    """Tokens that the model reads, in an encoder-decoder its encoder: `data.seq_len`."""
    outputs: int
    """Positions with logits. In an encoder-decoder these are the decoder's: the sentinels, each with its span."""
    targets: int
    """Positions whose predicted token counts in the loss."""
    spans: int = 0
    """Number of spans that are replaced by sentinels; 0 without span corruption."""


def longest_text(seq_len: int, fraction: float = FRACTION, mean_span: float = MEAN_SPAN) -> Lengths:
    """Return the token counts of a sample whose text is the longest that span corruption turns into at most `seq_len`
    input tokens.

    Args:
        seq_len: most tokens that the encoder reads.
        fraction: share of the text's tokens that lies in spans.
        mean_span: mean number of tokens in a span.
    """
    raw = seq_len - 1  # a span's sentinel is never longer than the span, so this fits
    while _corrupted(raw + 1, fraction, mean_span).inputs <= seq_len:
        raw += 1
    return _corrupted(raw, fraction, mean_span)


def _corrupted(raw: int, fraction: float, mean_span: float) -> Lengths:
    noise = max(1, round(raw * fraction))
    spans = min(max(1, round(noise / mean_span)), raw - noise)  # at least one token stays before each
    outputs = noise + spans + 1
    return Lengths(raw, raw - noise + spans + 1, outputs, outputs, spans)
