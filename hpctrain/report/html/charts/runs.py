"""Figures of several runs: a curve for each run, and a band for each group of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.html.charts.chart import COLOURS, Axis, Curve, Form, LineChart
from hpctrain.report.html.charts.reduce import smoothed
from hpctrain.report.html.charts.steps import Progress, Value
from hpctrain.report.summaries import losses_by_set

BAND_POINTS = 400
"""Most points of a band."""


@dataclass(frozen=True)
class RunCurves:
    """A run whose curves are drawn beside those of others."""

    name: str
    rows: Sequence[MetricRow]
    """One row for each step that led to the model."""
    start_s: float
    """Start of the run, in seconds since 1970."""
    seq_len: int
    """Tokens of a sequence."""


@dataclass(frozen=True)
class _Figure:
    """A figure of steps that is drawn for several runs."""

    id: str
    title: str
    axis: Axis
    value: Value
    is_smoothed: bool = True
    """Whether many values are drawn as an exponential mean."""


_FIGURES = (
    _Figure("loss", "Training loss (nats a token)", Axis("nats"), lambda row: row.loss),
    _Figure("valid", "Validation loss (nats a token)", Axis("nats"), lambda row: _valid_loss(row)),
    _Figure("throughput", "Throughput (tokens/s)", Axis("tokens/s", from_zero=True), lambda row: row.tokens_per_s),
    _Figure("step-time", "Time of a step (s)", Axis("", "s", from_zero=True), lambda row: row.step_time_s),
    _Figure("lr", "Learning rate", Axis("", from_zero=True), lambda row: row.lr, False),
    _Figure("grad-norm", "Gradient norm", Axis("", from_zero=True), lambda row: row.grad_norm),
    _Figure("memory", "Memory (B)", Axis("", "B", from_zero=True), lambda row: row.memory_bytes_max, False),
    _Figure("mfu", "MFU", Axis("", "%", from_zero=True), lambda row: row.mfu),
)  # fmt: skip


def _valid_loss(row: MetricRow) -> float | None:
    return next(iter(losses_by_set(row).values()), None)


def run_charts(runs: Sequence[RunCurves], groups: Mapping[str, Sequence[int]]) -> list[LineChart]:
    """Return the charts of several runs, each over steps, tokens and time; those without a value are left out.

    Args:
        runs: the runs with steps.
        groups: name of each group of seeds -> positions of its runs, which are drawn as one band.
    """
    seconds = max((run.rows[-1].time_s - run.start_s for run in runs), default=0.0)
    drawn = [_chart(figure, runs, groups, seconds) for figure in _FIGURES]
    return [chart for chart in drawn if chart is not None]


def _chart(
    figure: _Figure, runs: Sequence[RunCurves], groups: Mapping[str, Sequence[int]], seconds: float
) -> LineChart | None:
    progresses = [Progress(run.start_s, run.seq_len, seconds) for run in runs]
    in_groups = {at for group in groups.values() for at in group}
    first = {group[0]: name for name, group in groups.items()}
    curves: list[Curve] = []
    colour = 0
    for at, (run, progress) in enumerate(zip(runs, progresses, strict=True)):
        if at in first:
            seeds = [runs[member] for member in groups[first[at]]]
            made = _band(first[at], seeds, progress, figure, colour)
        elif at in in_groups:
            continue
        else:
            made = _curves(run, progress, figure, colour)
        curves += made
        colour += 1
    if not curves:
        return None
    note = "A click on a name hides or shows its line."
    if any(curve.form == "faint" for curve in curves) or (in_groups and figure.is_smoothed):
        note += " Lines are exponential means over 2 % of the steps."
    if in_groups:
        note += " A band has the smallest and the largest of its seeds, its line their mean."
    height = 420 if figure.id == "loss" else 320
    return LineChart(figure.id, figure.title, note, progresses[0].axes, figure.axis, curves, height=height)


def _form(colour: int) -> Form:
    return "line" if colour < COLOURS else "dashed"


def _curves(run: RunCurves, progress: Progress, figure: _Figure, colour: int) -> list[Curve]:
    value = figure.value
    rows = [row for row in run.rows if value(row) is not None]
    if not rows:
        return []
    values = [value(row) for row in rows]
    smooth, places = smoothed(values) if figure.is_smoothed else None, progress.of(rows)
    curve = Curve(run.name, places, values if smooth is None else smooth, colour, _form(colour))
    return [curve] if smooth is None else [Curve(run.name, places, values, colour, "faint"), curve]


def _band(name: str, runs: Sequence[RunCurves], progress: Progress, figure: _Figure, colour: int) -> list[Curve]:
    """Return the mean over seeds, smoothed, with the smallest and the largest, at steps that all of them have."""
    value, columns = figure.value, list[dict[int, float]]()
    for run in runs:
        rows = [row for row in run.rows if value(row) is not None]
        values = [value(row) for row in rows]
        smooth = (smoothed(values) if figure.is_smoothed else None) or values
        columns.append({row.step: y for row, y in zip(rows, smooth, strict=True) if y is not None})
    steps = sorted(set(columns[0]).intersection(*columns[1:]))
    stride = -(-len(steps) // BAND_POINTS) or 1
    steps = sorted({*steps[::stride], *steps[-1:]})
    if not steps:
        return []
    by_step = {row.step: row for row in runs[0].rows}
    sets = [[column[step] for column in columns] for step in steps]
    means = [sum(values) / len(values) for values in sets]
    places = progress.of([by_step[step] for step in steps])
    return [
        Curve(
            name,
            places,
            means,
            colour,
            _form(colour),
            [min(values) for values in sets],
            [max(values) for values in sets],
        )
    ]
