"""Summary of trainings with several seeds: the gap of each method's loss to that of training with exact sums, with its
confidence interval, at equal steps and at equal time.

The curves of the trainings become one HTML page that needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from hpctrain import __version__
from hpctrain.base.units import format_si
from hpctrain.report.html.charts.chart import COLOURS, Axis, Curve, Form, LineChart
from hpctrain.report.html.page import write_charts

TARGET_GAP = 0.01
"""A method has reached the reference once its loss is at most this share above the reference's last loss."""

Rows = Sequence[Mapping[str, Any]]
"""Trainings as JSON objects with the fields of `Training`, without those that are None."""
FIRST_SHOWN = 0.05
"""Share of the steps that the charts leave out at the beginning, because all curves fall together there."""


@dataclass(frozen=True)
class Band:
    """The mean of one figure of a method over its trainings (seeds and texts), with the half width of the mean's 95 %
    confidence interval."""

    mean: float
    half_width: float | None
    """Half width of the 95 % interval of the mean, by Student's t; None with a single training."""
    seeds: int
    """Number of trainings: seeds, or pairs of a text and a seed."""


@dataclass(frozen=True)
class Summary:
    """The results of one method over all its seeds: last loss, its gap to that of training with exact sums, number of
    seeds that `diverged`, bytes and CPU seconds of a worker in a step, and results by link rate (`at_rate`, in bits per
    second). The training with exact sums is the reference."""

    method: str
    loss: Band | None
    """Loss at the last step; None if no seed reached the last step."""
    gap_pct: Band | None
    """Gap of the last loss to that of the reference with the same text and seed, in percent of the reference's loss."""
    diverged: int
    """Number of seeds whose loss became infinite or NaN."""
    sent_bytes: float | None
    """Payload bytes that a worker sends in a step; None where they are not counted."""
    cpu_s: float
    """CPU seconds of a worker in a step, mean over steps, workers and seeds."""
    at_rate: dict[float, AtRate]
    """Results by link rate in bits per second; empty where the bytes are not counted."""
    late_sent_bytes: float | None = None
    """The same as `sent_bytes` after the warm-up steps, over the second half of the steps; None also where a row of an
    earlier version does not have them."""


@dataclass(frozen=True)
class AtRate:
    """The results of one method on links of one rate, where a step takes the seconds of `step_seconds`: the gap to the
    reference (training with exact sums) at equal time, and the seconds (`target_s`) until the loss is within
    `TARGET_GAP` of the reference's last loss."""

    step_s: float
    """Seconds of a step, as the mean over the seeds."""
    gap_pct: Band | None
    """Gap of the loss to that of the reference, in percent, both at the time when the fastest method has made its last
    step."""
    target_s: float | None
    """Mean seconds until the loss is within `TARGET_GAP` of the reference's last loss; None where a seed never reaches
    it."""


def summarise(rows: Rows, reference: str, rates: Sequence[float]) -> list[Summary]:
    """Return one summary for each method, in the order of the rows. Only rows with text and seed of one of the
    reference's rows count; a method without such a row is left out.

    Args:
        reference: the method with exact sums, with whose losses the others are compared.
        rates: link rates in bits per second.

    Raises:
        ValueError: the reference is not among the rows.
    """
    exact = {_pair_key(row): row for row in rows if row["method"] == reference}
    if not exact:
        raise ValueError(f"no row of {reference}")
    methods = dict.fromkeys(row["method"] for row in rows)
    by_method = {name: [row for row in rows if row["method"] == name and _pair_key(row) in exact] for name in methods}
    budgets = {rate: _budget_s(rows, rate) for rate in rates}
    return [_summary(name, method_rows, exact, budgets) for name, method_rows in by_method.items() if method_rows]


def _pair_key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a training shares with the training of the reference that it is compared with: text and seed."""
    return row.get("text"), row["seed"]


def band(values: Sequence[float]) -> Band | None:
    """Return the mean of `values` and its 95 % confidence interval; None without values.

    Args:
        values: one figure of a method, for each seed.
    """
    if not values:
        return None
    half = None
    if len(values) > 1:
        factor = float(stats.t.ppf(0.975, len(values) - 1))
        half = factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Band(float(np.mean(values)), half, len(values))


def step_seconds(row: Mapping[str, Any], rate: float) -> float | None:
    """Return the seconds of a step of the training `row` on links of `rate` bits per second: the mean
    CPU time of a worker in a step, plus the time of the bytes that a worker sends in a step. None where the bytes are
    not counted."""
    if "sent_bytes" not in row:
        return None
    return float(row["cpu_s"]) + 8 * float(row["sent_bytes"]) / rate


def loss_at(row: Mapping[str, Any], steps: float) -> float | None:
    """Return the validation loss after `steps` steps, interpolated linearly; None before the first validation of the
    training and after its last one.

    Args:
        row: record of one training; its key `curve` has pairs (step, validation loss).
        steps: number of steps.
    """
    points = row["curve"]
    if not points or not points[0][0] <= steps <= points[-1][0] * (1 + 1e-9):
        return None
    return float(np.interp(steps, [step for step, _ in points], [loss for _, loss in points]))


def steps_to(row: Mapping[str, Any], loss: float) -> float | None:
    """Return the number of steps after which the validation loss is first at most `loss`, interpolated linearly; None
    if it never is.

    Args:
        row: record of one training; its key `curve` has pairs (step, validation loss).
        loss: validation loss to reach.
    """
    before: tuple[float, float] | None = None
    for step, reached in row["curve"]:
        if reached <= loss:
            if before is None or before[1] == reached:
                return float(step)
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] + share * (step - before[0])
        before = (step, reached)
    return None


def _budget_s(rows: Rows, rate: float) -> float:
    """Return the seconds until the fastest training has made its last step, on links of `rate` bits per second.
    Trainings that diverged or did not count bytes are left out; infinity if no training remains.
    """
    whole = [(row, step_s) for row in rows if "loss" in row and (step_s := step_seconds(row, rate)) is not None]
    return min((row["curve"][-1][0] * step_s for row, step_s in whole), default=math.inf)


def _summary(
    method: str, rows: Rows, exact: Mapping[tuple[Any, Any], Mapping[str, Any]], budgets: Mapping[float, float]
) -> Summary:
    pairs = [(row, exact[_pair_key(row)]) for row in rows]
    gaps = [_gap_pct(row["loss"], other["loss"]) for row, other in pairs if "loss" in row and "loss" in other]
    counted = [float(row["sent_bytes"]) for row in rows if "sent_bytes" in row]
    late = [float(row["late_sent_bytes"]) for row in rows if "late_sent_bytes" in row]
    return Summary(
        method=method,
        loss=band([float(row["loss"]) for row in rows if "loss" in row]),
        gap_pct=band(gaps),
        diverged=sum("diverged_step" in row for row in rows),
        sent_bytes=float(np.mean(counted)) if counted else None,
        cpu_s=float(np.mean([row["cpu_s"] for row in rows])),
        at_rate={rate: _at_rate(pairs, rate, budget) for rate, budget in budgets.items()} if counted else {},
        late_sent_bytes=float(np.mean(late)) if late else None,
    )


def _at_rate(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], rate: float, budget_s: float) -> AtRate:
    gaps: list[float] = []
    reached: list[float | None] = []
    times: list[float] = []
    for row, other in pairs:
        step_s, other_s = step_seconds(row, rate), step_seconds(other, rate)
        if step_s is None or other_s is None:
            continue
        times.append(step_s)
        loss, reference_loss = loss_at(row, budget_s / step_s), loss_at(other, budget_s / other_s)
        if loss is not None and reference_loss is not None:
            gaps.append(_gap_pct(loss, reference_loss))
        if "loss" in other:
            steps = steps_to(row, other["loss"] * (1 + TARGET_GAP))
            reached.append(None if steps is None else steps * step_s)
    done = [value for value in reached if value is not None]
    return AtRate(
        step_s=float(np.mean(times)),
        gap_pct=band(gaps),
        target_s=float(np.mean(done)) if done and len(done) == len(reached) else None,
    )


def _gap_pct(loss: float, reference: float) -> float:
    return 100 * (loss / reference - 1)


def write_page(target: Path, rows: Rows, rates: Sequence[float]) -> None:
    """Write an HTML page with each method's validation loss over steps, and over time at each link rate, for each text.
    Bands are the 95 % interval of the mean over seeds.

    Args:
        rates: link rates in bits per second.

    Raises:
        StorageError: the file cannot be written.
    """
    charts = []
    for number, text in enumerate(dict.fromkeys(row.get("text") for row in rows)):
        chosen = [row for row in rows if row.get("text") == text]
        loss = f"Validation loss of the text {text}" if text else "Validation loss"
        by_step = _curves(chosen, lambda row: 1.0)
        charts.append(_chart(f"steps-{number}", f"{loss} by step (nats a token)", Axis("step"), by_step))
        for rate in rates:
            by_time = _curves(chosen, lambda row, rate=rate: step_seconds(row, rate))  # type: ignore[misc]
            title = f"{loss} by time at {format_si(rate, 'bit/s')} (nats a token)"
            charts.append(_chart(f"time-{number}-{rate:.0f}", title, Axis("time", "s"), by_time))
    write_charts(target, "Compression and convergence", [], charts, f"Measured by hpctrain {__version__}.")


def _chart(name: str, title: str, x: Axis, curves: list[Curve]) -> LineChart:
    note = "Mean over seeds; the band is the 95 % interval of the mean."
    return LineChart(name, title, note, (x,), Axis("nats"), curves, height=460)


def _curves(rows: Rows, scale: Callable[[Mapping[str, Any]], float | None]) -> list[Curve]:
    shown_curves: list[Curve] = []
    for index, name in enumerate(dict.fromkeys(row["method"] for row in rows)):
        curves = [row for row in rows if row["method"] == name and row["curve"]]
        scales = [value for row in curves if (value := scale(row)) is not None]
        if not curves or len(scales) < len(curves):
            continue
        steps = [step for step, _ in min((row["curve"] for row in curves), key=len)]
        shown = [step for step in steps if step >= FIRST_SHOWN * steps[-1]]
        losses = {step: [dict(map(tuple, row["curve"]))[step] for row in curves] for step in shown}
        bands = [one for step in shown if (one := band(losses[step])) is not None]
        x = [step * float(np.mean(scales)) for step in shown]
        low = high = None
        if any(one.half_width for one in bands):
            low = [one.mean - (one.half_width or 0.0) for one in bands]
            high = [one.mean + (one.half_width or 0.0) for one in bands]
        form: Form = "line" if index < COLOURS else "dashed"
        shown_curves.append(Curve(name, (x,), [one.mean for one in bands], index, form, low, high))
    return shown_curves
