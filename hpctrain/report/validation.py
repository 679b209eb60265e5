"""Validation losses as text: each set with its perplexity."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.records.history.metric import MetricRow, perplexity

HELD_OUT = "valid"


def losses_by_set(row: MetricRow) -> dict[str, float]:
    """Return the validation losses of a step by display name; {} if the step had no validation."""
    held_out = {} if row.valid_loss is None else {HELD_OUT: row.valid_loss}
    return held_out | {f"{HELD_OUT} {name}": losses.loss for name, losses in (row.valid_sets or {}).items()}


def loss_words(losses: Mapping[str, float]) -> list[str]:
    """Return the losses as texts: ['valid 3.2500 (perplexity 25.79)', 'valid code 4.1000 (perplexity 60.34)']."""
    return [f"{name} {loss:.4f} ({_perplexity(loss)})" for name, loss in losses.items()]


def _perplexity(loss: float) -> str:
    value = perplexity(loss)
    return "perplexity too large to tell" if value is None else f"perplexity {value:.4g}"
