"""The report of a run folder as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.report.event_text import describe_event
from hpctrain.report.html import tables
from hpctrain.report.html.charts import steps
from hpctrain.report.html.charts.chart import Chart
from hpctrain.report.html.charts.matrices import fabric_charts
from hpctrain.report.html.page import render_page
from hpctrain.report.html.run_view import RunView, read_run_view


def write_report(folder: Path, target: Path, now: float) -> None:
    """Write the report of a run as HTML.

    Args:
        folder: run folder.
        target: file to write.
        now: wall clock, seconds since 1970.

    Raises:
        FileError: run.yaml is missing or wrong.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
        StorageError: the target cannot be written.
    """
    write_text(target, render(read_run_view(folder, now)))


def render(view: RunView) -> str:
    """Return the report of a run as HTML."""
    return render_page(
        "report.html.j2",
        view=view,
        describe_event=describe_event,
        tables=tables,
        loss_charts=_charts(view, steps.loss_chart),
        speed_charts=_charts(view, steps.throughput_chart, steps.step_time_chart),
        stage_charts=_charts(view, steps.stage_chart, steps.bubble_chart),
        bytes_charts=_charts(view, steps.bytes_chart),
        wall_charts=_charts(view, steps.wall_chart),
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
