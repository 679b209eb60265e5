"""Write report.html from a run folder: one file that needs no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpctrain import __version__
from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import InputError
from hpctrain.base.units import format_bytes, format_delta, format_seconds, format_si
from hpctrain.report import charts, tables
from hpctrain.report.charts import Chart, fabric_charts
from hpctrain.report.event_text import describe_event
from hpctrain.report.run_view import RunView, read_run_view


def write_report(folder: Path, target: Path, now: float) -> None:
    """Write the report of the run in `folder`.

    Args:
        now: wall clock, seconds since 1970.

    Raises:
        InputError: plotly is not installed.
        FileError: run.yaml is missing or wrong.
        StorageError: the target cannot be written.
    """
    script = plotly_script()
    write_text(target, render(read_run_view(folder, now), script))


def plotly_script() -> str:
    """Return the text of plotly.js, from the Python package plotly.

    Raises:
        InputError: plotly is not installed.
    """
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise InputError(
            "report: the package 'plotly' is not installed, its charts are part of the report; "
            "pip install 'hpctrain[report]'"
        ) from None


def render(view: RunView, script: str) -> str:
    """Return the report as HTML.

    Args:
        script: text of plotly.js, inserted into the page unchanged.
    """
    return render_page(
        "report.html.j2",
        view=view,
        describe_event=describe_event,
        tables=tables,
        loss_charts=_charts(view, charts.loss_chart),
        speed_charts=_charts(view, charts.throughput_chart, charts.step_time_chart),
        stage_charts=_charts(view, charts.stage_chart, charts.bubble_chart),
        bytes_charts=_charts(view, charts.bytes_chart),
        wall_charts=_charts(view, charts.wall_chart),
        fabric_charts=fabric_charts(view.topology) if view.topology else [],
        plotly=script,
    )


def render_page(template: str, **values: object) -> str:
    """Return the text of a page from its template in the folder `pages`."""
    environment = Environment(
        loader=PackageLoader("hpctrain.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=format_seconds, delta=format_delta, bytes=format_bytes, si=format_si, utc=utc_text
    )
    return environment.get_template(template).render(version=__version__, **values)


def _charts(view: RunView, *make: Callable[[RunView], Chart | None]) -> Sequence[Chart]:
    """Return the charts that have data; none before the first step."""
    if not view.rows:
        return []
    return [chart for chart in (draw(view) for draw in make) if chart is not None]
