"""Training losses of several runs at equal steps, or at equal tokens if steps have different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.records.history.run_log import MetricRow

POINTS = 5
"""Points at equal distances up to the end of the longest run."""
WINDOW = 0.02
"""Share of the longest run's progress over which a loss is a mean, because losses of single steps scatter."""


@dataclass(frozen=True)
class EqualProgress:
    """Points at which the losses of runs are compared."""

    unit: Literal["steps", "tokens"]
    """`steps` if all steps of all runs have the same number of tokens, else `tokens`."""
    points: list[int]
    """Steps or tokens since the start of a run, in ascending order: a fifth to five fifths of the longest run, and the
    largest number of steps or tokens that all runs with a step have reached. [] without steps."""


def equal_progress(histories: Sequence[Sequence[MetricRow]]) -> EqualProgress:
    """Return the points at which runs are compared.

    Args:
        histories: the rows of each run, one for each step in order.
    """
    known = [rows for rows in histories if rows]
    is_equal = len({row.tokens for rows in known for row in rows}) <= 1
    unit: Literal["steps", "tokens"] = "steps" if is_equal else "tokens"
    ends = [_positions(rows, unit)[-1] for rows in known]
    if not ends:
        return EqualProgress(unit, [])
    points = {max(ends) * number // POINTS for number in range(1, POINTS + 1)} | {min(ends)}
    return EqualProgress(unit, sorted(point for point in points if point > 0))


def losses_at(history: Sequence[MetricRow], progress: EqualProgress) -> list[float | None]:
    """Return a run's training loss in nats at each point of `progress`: the mean over the steps within `WINDOW` before
    the point, at least of the last step before it; None at points that the run has not reached.

    Args:
        history: the rows of the run, one for each step in order.
    """
    positions = _positions(history, progress.unit)
    window = WINDOW * progress.points[-1] if progress.points else 0.0
    losses: list[float | None] = []
    for point in progress.points:
        before = [row.loss for row, at in zip(history, positions, strict=True) if at <= point]
        if not before or positions[-1] < point:
            losses.append(None)
            continue
        near = [row.loss for row, at in zip(history, positions, strict=True) if point - window < at <= point]
        losses.append(sum(near) / len(near) if near else before[-1])
    return losses


def _positions(history: Sequence[MetricRow], unit: str) -> list[int]:
    """Return the steps or tokens from the start of the run to the end of each row's step."""
    if unit == "steps":
        return [row.step for row in history]
    positions, tokens = [], 0
    for row in history:
        tokens += row.tokens
        positions.append(tokens)
    return positions
