"""The report of several runs as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.report.comparison import ComparedRun, table
from hpctrain.report.html.charts.chart import Axis, Curve, LineChart
from hpctrain.report.html.page import render_page
from hpctrain.report.summaries import losses_by_set


def write_comparison(title: str, rows: Sequence[ComparedRun], target: Path, now: float) -> None:
    """Write a comparison as one HTML file that needs no network and no other file: a chart with the training losses of
    all runs, a chart with their validation losses, and the table.

    Args:
        title: heading of the page.
        rows: the runs, in the order of the table.
        target: file to write.
        now: seconds since 1970.

    Raises:
        FileError, UntrustedError: the metrics of a run are damaged, or are not trusted.
        StorageError: the target cannot be written.
    """
    histories = [
        (row.name, last_row_of_each_step(read_metrics(Path(row.folder) / "metrics.jsonl")))
        for row in rows
        if row.loss is not None  # else it has no curve, or its files cannot be read
    ]
    valid = [
        (name, [(row.step, losses[0]) for row in history if (losses := list(losses_by_set(row).values()))])
        for name, history in histories
    ]
    trained = [(name, [(row.step, row.loss) for row in history]) for name, history in histories]
    charts = [
        chart
        for chart in (
            _loss_chart("loss", "Training loss (nats a token)", trained),
            _loss_chart("valid", "Validation loss (nats a token)", valid),
        )
        if chart is not None
    ]
    page = render_page("comparison.html.j2", title=title, written=utc_text(now), charts=charts, columns=table(rows))
    write_text(target, page)


def _loss_chart(name: str, title: str, curves: Sequence[tuple[str, list[tuple[int, float]]]]) -> LineChart | None:
    lines = [
        Curve(run, ([step for step, _ in points],), [loss for _, loss in points], number)
        for number, (run, points) in enumerate(curves)
        if points
    ]
    note = "Mean cross-entropy, a line for each run. A click on a name hides or shows its line."
    return LineChart(name, title, note, (Axis("step"),), Axis("nats"), lines, height=420) if lines else None
