"""Pages of HTML, each of which needs no other file and no network: templates of the folder `pages`, with the library
that draws charts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpctrain import __version__
from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.units import format_bytes, format_delta, format_seconds, format_si
from hpctrain.report.html.charts.chart import Chart


@cache
def chart_library() -> str:
    """Return the text of the library that draws charts, a part of Apache ECharts with its licences."""
    return (resources.files("hpctrain.report.html") / "library" / "echarts.min.js").read_text(encoding="utf-8")


def render_page(template: str, **values: object) -> str:
    """Return a page of HTML from a template.

    Args:
        template: name of a file in the folder `pages`.
        values: variables of the template.
    """
    environment = Environment(
        loader=PackageLoader("hpctrain.report.html", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=format_seconds, delta=format_delta, bytes=format_bytes, si=format_si, utc=utc_text
    )
    return environment.get_template(template).render(version=__version__, library=chart_library(), **values)


def write_charts(target: Path, title: str, lines: Sequence[str], charts: Sequence[Chart], footer: str) -> None:
    """Write charts as one HTML file.

    Args:
        target: file to write.
        title: heading of the page.
        lines: sentences above the charts.
        footer: sentence below the charts.

    Raises:
        StorageError: the target cannot be written.
    """
    write_text(target, render_page("charts.html.j2", title=title, lines=lines, charts=charts, footer=footer))
