"""Lengths of a text and its targets when each of its spans is replaced by a sentinel (Raffel et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

FRACTION, MEAN_SPAN = 0.15, 3.0
"""Share of the tokens that is taken out, and their mean number in a span."""


@dataclass(frozen=True)
class SpanLengths:
    """Tokens of one sample; input and output end with the end of text."""

    raw: int
    """Tokens of the text."""
    inputs: int
    """Tokens of the text with a sentinel in place of each span."""
    outputs: int
    """Tokens of the targets: the sentinels, each with its span."""
    spans: int


def longest_text(seq_len: int, fraction: float = FRACTION, mean_span: float = MEAN_SPAN) -> SpanLengths:
    """Return the lengths of the longest text whose corrupted form has at most `seq_len` tokens."""
    raw = seq_len - 1  # a span's sentinel is never longer than the span, so this fits
    while _corrupted(raw + 1, fraction, mean_span).inputs <= seq_len:
        raw += 1
    return _corrupted(raw, fraction, mean_span)


def _corrupted(raw: int, fraction: float, mean_span: float) -> SpanLengths:
    noise = max(1, round(raw * fraction))
    spans = min(max(1, round(noise / mean_span)), raw - noise)  # at least one token stays before each
    return SpanLengths(raw, raw - noise + spans + 1, noise + spans + 1, spans)
