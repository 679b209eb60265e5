"""Token counts of a training sample, also with span corruption, where a sentinel replaces each span (Raffel et al.
2020)."""

from __future__ import annotations

from dataclasses import dataclass

FRACTION, MEAN_SPAN = 0.15, 3.0
"""Default share of the tokens that span corruption takes out, and default mean number of tokens in a span."""


@dataclass(frozen=True)
class Lengths:
    """Token counts of one sample. With span corruption, inputs and outputs end with the end of text."""

    raw: int
    """Tokens taken from the corpus."""
    inputs: int
    """Tokens that the model, or the encoder of an encoder-decoder, reads: data.seq_len."""
    outputs: int
    """Positions with logits; in an encoder-decoder those of the decoder: the sentinels, each with its span."""
    targets: int
    """Positions with a target."""
    spans: int = 0
    """Number of spans that are taken out, each replaced by a sentinel; 0 without span corruption."""


def longest_text(seq_len: int, fraction: float = FRACTION, mean_span: float = MEAN_SPAN) -> Lengths:
    """Return the lengths of the longest text whose corrupted form has at most `seq_len` tokens."""
    raw = seq_len - 1  # a span's sentinel is never longer than the span, so this fits
    while _corrupted(raw + 1, fraction, mean_span).inputs <= seq_len:
        raw += 1
    return _corrupted(raw, fraction, mean_span)


def _corrupted(raw: int, fraction: float, mean_span: float) -> Lengths:
    noise = max(1, round(raw * fraction))
    spans = min(max(1, round(noise / mean_span)), raw - noise)  # at least one token stays before each
    outputs = noise + spans + 1
    return Lengths(raw, raw - noise + spans + 1, outputs, outputs, spans)
