"""The figures of one run over its steps: losses, speed, memory, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.html.charts.chart import Axis, Chart, Curve, LineChart, Mark
from hpctrain.report.html.charts.reduce import smoothed
from hpctrain.report.html.run_view import RunView
from hpctrain.report.percentiles import PERCENTILES, stretches_of_steps
from hpctrain.report.summaries import HELD_OUT, losses_by_set

Value = Callable[[MetricRow], float | None]
STEP = Axis("step")
BEHIND = 8
"""Colour of a faint curve behind the others: the position after the palette's eight colours, which is a grey."""


class Progress:
    """The horizontal axes of a run: steps, tokens, time since its start.

    Args:
        start_s: start of the run, in seconds since 1970.
        seq_len: tokens of a sequence.
        seconds: length of the axis of time, from which its unit follows.
    """

    def __init__(self, start_s: float, seq_len: int, seconds: float) -> None:
        self._start_s, self._seq_len = start_s, seq_len
        self._scale, name = next((scale, name) for scale, name in _TIMES if seconds >= 3 * scale or scale == 1.0)
        self.axes = (STEP, Axis("tokens"), Axis(f"{name} since the start"))

    def of(self, rows: Sequence[MetricRow]) -> tuple[list[float], ...]:
        """Return the coordinates of the rows on each of the three axes."""
        return (
            [row.step for row in rows],
            [row.samples * self._seq_len for row in rows],
            [self.time(row.time_s) for row in rows],
        )

    def time(self, time_s: float) -> float:
        """Return the coordinate of a time, in seconds since 1970, on the axis of time."""
        return (time_s - self._start_s) / self._scale


_TIMES = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
"""(seconds of the unit, its name) of each unit of the axis of time. The first unit of which a run has three or more is
used."""


def progress_of(view: RunView) -> Progress:
    """Return the horizontal axes of a run."""
    return Progress(view.start_s or 0.0, view.run.data.seq_len, view.elapsed_s or 0.0)


def loss_chart(view: RunView) -> Chart:
    """Return the chart of the training loss, smoothed and as it is, with the steps that were done again and the
    validation losses."""
    note = "Mean cross-entropy of the global batch."
    chart = _progress_chart(
        view, "loss", "Loss (nats a token)", note, "training", lambda row: row.loss, Axis("nats"), 400
    )
    validated = [(row, losses) for row in view.history if (losses := losses_by_set(row))]
    for number, name in enumerate(dict.fromkeys(name for _, losses in validated for name in losses)):
        points = [(row, losses[name]) for row, losses in validated if name in losses]
        places = progress_of(view).of([row for row, _ in points])
        title = name.replace(HELD_OUT, "validation", 1)
        chart.curves.append(Curve(title, places, [loss for _, loss in points], 1 + number, "points"))
    return chart


def throughput_chart(view: RunView) -> Chart:
    """Return the chart of the whole job's tokens per second."""
    note = "Tokens of the whole job, by the time from one step's end to the next."
    axis = Axis("tokens/s", from_zero=True)
    return _progress_chart(view, "throughput", "Throughput (tokens/s)", note, "throughput", _tokens_per_s, axis)


def _tokens_per_s(row: MetricRow) -> float:
    return row.tokens_per_s


def lr_chart(view: RunView) -> Chart:
    """Return the chart of the learning rate."""
    curve = Curve("learning rate", (_steps(view.history),), [row.lr for row in view.history])
    return LineChart("lr", "Learning rate", "As each step used it.", (STEP,), Axis("", from_zero=True), [curve])


def grad_norm_chart(view: RunView) -> Chart | None:
    """Return the chart of the gradient norm; None if no step has one."""
    values = [row.grad_norm for row in view.history]
    known = [value for value in values if value]
    if not known:
        return None
    is_log = max(known) > 50 * min(known)
    note = "Of all parameters, before clipping. A gap is a step whose gradients overflowed."
    curves = [Curve("gradient norm", (_steps(view.history),), values)]
    if (clip := view.run.optimizer.clip_norm) is not None and clip < max(known):
        ends = [view.history[0].step, view.history[-1].step]
        curves.append(Curve("clipped to", (ends,), [clip, clip], 1, "dashed"))
    axis = Axis("", from_zero=not is_log, is_log=is_log)
    return LineChart("grad-norm", "Gradient norm", note, (STEP,), axis, curves, _marks(view, 1))


def memory_chart(view: RunView) -> Chart | None:
    """Return the chart of the peak memory of the worker with the most; None if it was not measured."""
    note = "Peak of the worker with the most: resident memory without files on a CPU, torch's allocations on a GPU."
    series: dict[str, Value] = {"memory": lambda row: row.memory_bytes_max}
    return _step_chart(view, "memory", "Memory (B)", note, series, Axis("", "B", from_zero=True))


def mfu_chart(view: RunView) -> Chart | None:
    """Return the chart of the model FLOPs utilization; None where the peak of the devices is not known."""
    note = "Model FLOPs utilization: share of the dense 16-bit FLOPs by the GPUs' data sheets."
    series: dict[str, Value] = {"MFU": lambda row: row.mfu}
    return _step_chart(view, "mfu", "MFU", note, series, Axis("", "%", from_zero=True))


def step_time_chart(view: RunView) -> Chart:
    """Return the chart of the step time: percentiles over stretches of steps, and each step as a faint curve behind
    them. With too few steps for stretches, the chart has each step alone."""
    curves = [_behind("each step", view.history, lambda row: row.step_time_s)]
    stretches = stretches_of_steps(view.history)
    for number, name in enumerate(PERCENTILES if stretches else ()):
        x = [stretch.step for stretch in stretches]
        curves.append(Curve(name, (x,), [stretch.seconds[number] for stretch in stretches], number))
    if not stretches:
        curves = [Curve("each step", (_steps(view.history),), [row.step_time_s for row in view.history])]
    note = "The first step of a generation also warms up caches and connections."
    if stretches:
        note = f"Percentiles over each {stretches[0].steps} steps. {note}"
    axis = Axis("", "s", from_zero=True)
    return LineChart("step-time", "Time of a step (s)", note, (STEP,), axis, curves, _marks(view, 1))


def stage_chart(view: RunView) -> Chart | None:
    """Return the chart of each pipeline stage's compute time; None if no step has reported it."""
    stages = range(max((len(row.stage_time_s) for row in view.history), default=0))
    series: dict[str, Value] = {f"stage {stage}": partial(_stage_time, stage=stage) for stage in stages}
    note = "Forward and backward in a step, of the slowest replica. The slowest stage sets the pace."
    return _step_chart(view, "stages", "Compute time by stage (s)", note, series, Axis("", "s", from_zero=True))


def _stage_time(row: MetricRow, stage: int) -> float | None:
    return row.stage_time_s[stage] if stage < len(row.stage_time_s) else None


def bubble_chart(view: RunView) -> Chart | None:
    """Return the chart of the bubble fraction; None if no step had a pipeline."""
    note = "Share of the pipeline's time in which a device waited for its neighbours; mean over devices."
    series: dict[str, Value] = {"bubble": lambda row: row.bubble_fraction}
    return _step_chart(view, "bubble", "Pipeline bubble", note, series, Axis("", "%", from_zero=True))


def bytes_chart(view: RunView) -> Chart | None:
    """Return the chart of the bytes sent in a step, by mesh axis, and within and between nodes where gradients are
    summed by level; None if nothing was sent."""
    series: dict[str, Value] = {name: partial(_bytes_sent, axis=axis) for axis, name in _AXES.items()}
    note = "On the wire of the whole job, counted where it is sent."
    return _step_chart(view, "bytes", "Bytes sent in a step (B)", note, series, Axis("", "B", from_zero=True))


_AXES = {
    "dp": "data parallel",
    "dp_intra_node": "data parallel, within nodes",
    "dp_inter_node": "data parallel, between nodes",
    "pp": "pipeline",
    "tp": "tensor parallel",
}


def _bytes_sent(row: MetricRow, axis: str) -> float | None:
    sent: int | None = getattr(row.bytes_sent, axis)
    return sent


def compression_chart(view: RunView) -> Chart | None:
    """Return the chart of the figures of gradient compression; None without compression."""
    series: dict[str, Value] = {
        "density": lambda row: row.compression.density if row.compression else None,
        "residual / gradient": lambda row: row.compression.residual_norm_ratio if row.compression else None,
    }
    note = (
        "Density: share of the gradient's numbers that is sent. Residual: its norm by the gradient's. Means over ranks."
    )
    return _step_chart(view, "compression", "Gradient compression", note, series, Axis("", from_zero=True))


def wall_chart(view: RunView) -> Chart:
    """Return the chart of steps over elapsed time: a drop is work lost to a fault, a flat stretch is time without
    training."""
    progress = progress_of(view)
    curve = Curve("step", progress.of(view.rows)[2:], [row.step for row in view.rows])
    faults = [event.time_s for recovery in view.recoveries for event in recovery.faults]
    ends = [recovery.time_s for recovery in view.recoveries if recovery.time_s is not None]
    marks = [Mark((progress.time(time_s),), "fault") for time_s in faults]
    marks += [Mark((progress.time(time_s),), "recovery") for time_s in ends]
    note = "Dotted: a fault was seen. Dashed: the first step afterwards. A fall is work that had to be done again."
    axis = Axis("step", from_zero=True)
    return LineChart("wall", "Steps done over time", note, progress.axes[2:], axis, [curve], marks)


def _progress_chart(
    view: RunView, id_: str, title: str, note: str, name: str, value: Value, axis: Axis, height: int = 320
) -> LineChart:
    """Return a chart over steps, tokens and time: the values, smoothed where there are many, and those of steps that
    were done again.

    Args:
        id_: name of the chart in the page.
    """
    progress = progress_of(view)
    places, values = progress.of(view.history), [value(row) for row in view.history]
    counted = {id(row) for row in view.history}
    again = [row for row in view.rows if id(row) not in counted]
    curves = [Curve("done again", progress.of(again), [value(row) for row in again], 5, "dashed")] if again else []
    smooth = smoothed(values)
    if smooth is not None:
        curves.append(Curve("each step", places, values, BEHIND, "faint"))
        note += " The line is an exponential mean over 2 % of the steps."
    curves.append(Curve(name, places, values if smooth is None else smooth))
    if view.recoveries:
        note += " A dashed vertical line marks the first step after a fault."
    return LineChart(id_, title, note, progress.axes, axis, curves, _marks(view, 3), height=height)


def _step_chart(
    view: RunView, id_: str, title: str, note: str, series: dict[str, Value], axis: Axis
) -> LineChart | None:
    """Return a chart of `series` over the steps; a repeated step appears once, as it was made last. None if no step has
    a value other than 0.

    Args:
        id_: name of the chart in the page.
        series: name of a line -> function that returns its value at a step.
    """
    steps = _steps(view.history)
    curves = [
        Curve(name, (steps,), values, index)
        for index, (name, value) in enumerate(series.items())
        if any(values := [value(row) for row in view.history])
    ]
    return LineChart(id_, title, note, (STEP,), axis, curves) if curves else None


def _behind(name: str, rows: Sequence[MetricRow], value: Value) -> Curve:
    return Curve(name, (_steps(rows),), [value(row) for row in rows], BEHIND, "faint")


def _steps(rows: Sequence[MetricRow]) -> list[float]:
    return [row.step for row in rows]


def _marks(view: RunView, axes: int) -> list[Mark]:
    """Return a mark for each recovery, at the first step that its new generation made, on the first `axes` axes."""
    by_step = {row.step: row for row in view.history} if view.recoveries else {}
    rows = [row for recovery in view.recoveries if (row := by_step.get(recovery.step or -1)) is not None]
    places = zip(*progress_of(view).of(rows)[:axes], strict=True)
    return [Mark(place, "recovery") for place in places]
