"""Percentiles of step times: of a whole run, and of stretches of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.records.history.run_log import MetricRow

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
STRETCHES = 60
"""Most stretches of a run."""
LEAST_STEPS = 20
"""Fewest steps of a stretch; with fewer, the 95th percentile would say little more than the longest step."""


@dataclass(frozen=True)
class StepStretch:
    """Some successive steps of a run."""

    step: int
    """The last of the steps."""
    steps: int
    """How many steps a stretch of this run has; the last stretch may have more."""
    seconds: tuple[float, ...]
    """The percentiles of their step times, in the order of `PERCENTILES`."""


def step_time_percentiles(rows: Sequence[MetricRow]) -> tuple[float, ...]:
    """Return the percentiles of the step times in the order of `PERCENTILES`, in seconds; () without steps. A
    percentile that lies between two step times is interpolated."""
    import numpy as np  # the terminal's views need none

    times = [row.step_time_s for row in rows]
    return tuple(map(float, np.percentile(times, list(PERCENTILES.values())))) if times else ()


def stretches_of_steps(rows: Sequence[MetricRow]) -> list[StepStretch]:
    """Cut the steps of a run into at most `STRETCHES` stretches of equally many steps, at least `LEAST_STEPS`; the
    steps that remain are part of the last stretch. Return [] for fewer steps than two stretches have.

    Args:
        rows: the rows of metrics.jsonl, in order of their steps.
    """
    steps = max(LEAST_STEPS, math.ceil(len(rows) / STRETCHES))
    if len(rows) < 2 * steps:
        return []
    count = len(rows) // steps
    ends = [steps * number for number in range(1, count)] + [len(rows)]
    parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [StepStretch(part[-1].step, steps, step_time_percentiles(part)) for part in parts]
