"""The report of a run folder as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.collector import collector_paused
from hpctrain.base.errors import HpctrainError, UntrustedError
from hpctrain.report.advice import RunFacts, next_time
from hpctrain.report.device_hours import SPENT
from hpctrain.report.event_text import describe_event
from hpctrain.report.html.charts import steps
from hpctrain.report.html.charts.chart import Chart
from hpctrain.report.html.charts.layers import layer_heat_map
from hpctrain.report.html.charts.matrices import fabric_charts
from hpctrain.report.html.charts.ranks import rank_heat_map, step_timeline
from hpctrain.report.html.page import render_page
from hpctrain.report.html.run_view import RunView, read_run_view
from hpctrain.report.html.tables import plan, run, words
from hpctrain.report.step_trace import PredictedSpan

Predict = Callable[[Path, int], list[PredictedSpan]]
"""Function (run folder, number of a generation) -> operations of a step under that generation's plan, as the planner
predicts them."""
MOST_PREDICTED_RANKS = 256
"""Most ranks of a plan whose step is simulated for the report, which takes seconds for thousands of them."""


def write_report(folder: Path, target: Path, now: float, predict: Predict | None = None) -> None:
    """Write the report of a run as HTML.

    Args:
        folder: run folder.
        target: file to write.
        now: wall clock, seconds since 1970.
        predict: simulates the step that was recorded; None: the timeline has measured times only.

    Raises:
        FileError: run.yaml is missing or wrong.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
        StorageError: the target cannot be written.
    """
    with collector_paused():
        view = read_run_view(folder, now)
        write_text(target, render(view, _predicted(folder, view, predict)))


def _predicted(folder: Path, view: RunView, predict: Predict | None) -> list[PredictedSpan]:
    """Return the predicted spans of the recorded step; [] where there are none, or they cannot be computed."""
    record = view.recorded_step
    if predict is None or record is None or len(record.ranks) > MOST_PREDICTED_RANKS:
        return []
    try:
        return predict(folder, record.generation)
    except UntrustedError:
        raise
    except HpctrainError as error:
        view.damaged.append(f"the predicted step is absent: {error}")
        return []


def render(view: RunView, predicted: Sequence[PredictedSpan] = ()) -> str:
    """Return the report of a run as HTML.

    Args:
        predicted: operations of the recorded step, as the planner predicts them.
    """
    heat_map = rank_heat_map(view.rank_history)
    return render_page(
        "report.html.j2",
        view=view,
        describe_event=describe_event,
        run_tables=run,
        plan_tables=plan,
        words=words,
        spent=SPENT,
        notes=next_time(RunFacts(view.run, view.status, view.events, view.spans, view.device_hours, view.rank_rows)),
        loss_charts=_charts(view, steps.loss_chart),
        speed_charts=_charts(view, steps.throughput_chart, steps.step_time_chart, steps.mfu_chart),
        training_charts=_charts(view, steps.lr_chart, steps.grad_norm_chart, steps.memory_chart),
        stage_charts=_charts(view, steps.stage_chart, steps.bubble_chart),
        bytes_charts=_charts(view, steps.bytes_chart, steps.compression_chart),
        layer_charts=[layers] if (layers := layer_heat_map(view.layers)) else [],
        wall_charts=_charts(view, steps.wall_chart),
        rank_charts=[heat_map] if heat_map else [],
        timelines=[step_timeline(view.recorded_step, predicted)] if view.recorded_step else [],
        fabric_charts=fabric_charts(view.topology) if view.topology else [],
    )


def _charts(view: RunView, *make: Callable[[RunView], Chart | None]) -> Sequence[Chart]:
    """Return the charts that have data; none before the run's first step.

    Args:
        make: functions that return a chart, or None if it has no data.
    """
    if not view.rows:
        return []
    return [chart for chart in (draw(view) for draw in make) if chart is not None]
