"""HTML pages, each of which needs no other file: the report of a run folder, and the timeline of a step.

A timeline shows the actions of a step as bars over time: a Gantt chart on a page, or lines of letters on the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.text import Text

from hpctrain import __version__
from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import InputError
from hpctrain.base.requirements import pip_install
from hpctrain.base.units import format_bytes, format_delta, format_seconds, format_si
from hpctrain.report.event_text import describe_event
from hpctrain.report.html import charts, tables
from hpctrain.report.html.charts import Chart, Trace, colour, fabric_charts
from hpctrain.report.html.run_view import RunView, read_run_view


def write_report(folder: Path, target: Path, now: float) -> None:
    """Write the report of a run as HTML.

    Args:
        folder: run folder.
        target: file to write.
        now: wall clock, seconds since 1970.

    Raises:
        InputError: plotly is not installed.
        FileError: run.yaml is missing or wrong.
        UntrustedError: another user owns the run folder or a file in it, or can write to it.
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
            f"run `{pip_install('plotly')}`"
        ) from None


def render(view: RunView, script: str) -> str:
    """Return the report of a run as HTML.

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
    """Return a page of HTML from a template in the folder `pages`.

    Args:
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
    return environment.get_template(template).render(version=__version__, **values)


def _charts(view: RunView, *make: Callable[[RunView], Chart | None]) -> Sequence[Chart]:
    """Return the charts that have data; none before the run's first step.

    Args:
        make: functions that return a chart, or None if it has no data.
    """
    if not view.rows:
        return []
    return [chart for chart in (draw(view) for draw in make) if chart is not None]


KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "S": "sum over replicas",
    "U": "norm and optimizer",
}
"""Meaning of each letter of a timeline, in the order of the colours."""
WAITS = "·"
STYLES = {"F": "blue", "B": "dark_orange", "I": "green", "W": "yellow", "S": "magenta", "U": "cyan", WAITS: "dim"}
MOST_BARS = 20_000
"""Most bars of a page; browsers scroll pages with so many without delay."""


@dataclass(frozen=True)
class Bar:
    """One action in a row of a timeline. Its times are seconds from the start of the step."""

    row: int
    """Pipeline rank of the action."""
    kind: str
    """Kind of the action, a key of `KINDS`."""
    label: str
    """Text that names the action, such as '2F0'."""
    start_s: float
    end_s: float


def letters(bars: Sequence[Bar], rows: int, total_s: float, width: int) -> list[str]:
    """Return a timeline as one line of `width` letters for each row.

    A letter is the kind of action that takes most of the column's time, or `WAITS` if idle time is longer.

    Args:
        rows: number of rows, one for each pipeline rank.
        total_s: time that the whole width stands for, in seconds.
    """
    if total_s <= 0:
        return [WAITS * width] * rows
    column_s = total_s / width
    shares: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in range(rows)]
    for bar in bars:
        first = min(width - 1, int(bar.start_s / column_s))
        last = min(width - 1, int(bar.end_s / column_s))
        for column in range(first, last + 1):
            inside = min(bar.end_s, (column + 1) * column_s) - max(bar.start_s, column * column_s)
            cell = shares[bar.row][column]
            cell[bar.kind] = cell.get(bar.kind, 0.0) + max(0.0, inside)
    return ["".join(_letter(cell, column_s) for cell in row) for row in shares]


def _letter(cell: dict[str, float], column_s: float) -> str:
    idle = column_s - sum(cell.values())
    kind = max(cell, key=lambda letter: cell[letter], default=WAITS)
    return WAITS if not cell or idle > cell[kind] else kind


def terminal_lines(bars: Sequence[Bar], rows: int, total_s: float, width: int) -> list[Text]:
    """Return a timeline in colour: a line for each pipeline rank, which begins with the number of the rank, and below
    them a line that explains the letters.

    Args:
        rows: number of pipeline ranks.
        total_s: time that the whole width stands for, in seconds.
        width: columns of the terminal.
    """
    head = len(str(rows - 1)) + 1
    lines = []
    for number, line in enumerate(letters(bars, rows, total_s, max(10, width - head))):
        text = Text(f"{number:>{head - 1}} ")
        for letter in line:
            text.append(letter, style=STYLES[letter])
        lines.append(text)
    kinds = [kind for kind in KINDS if any(bar.kind == kind for bar in bars)]
    lines.append(Text(", ".join([*(f"{kind} {KINDS[kind]}" for kind in kinds), f"{WAITS} waits"])))
    return lines


def gantt_chart(name: str, title: str, bars: Sequence[Bar], rows: int) -> Chart:
    """Return a timeline as a chart with one horizontal bar for each action and one row for each pipeline rank.

    Args:
        name: name of the chart in the page.
        title: the chart's heading.
        bars: the actions of one replica.
        rows: number of pipeline ranks.
    """
    shown = bars[:MOST_BARS]
    traces: list[Trace] = []
    for index, (kind, words) in enumerate(KINDS.items()):
        bars_of_kind = [bar for bar in shown if bar.kind == kind]
        if not bars_of_kind:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "y": [f"rank {bar.row}" for bar in bars_of_kind],
                "base": [bar.start_s for bar in bars_of_kind],
                "x": [bar.end_s - bar.start_s for bar in bars_of_kind],
                "customdata": [[bar.label, bar.start_s] for bar in bars_of_kind],
                "marker": {"color": colour(index)},
                "hovertemplate": "%{customdata[0]}: %{x:.4s}s from %{customdata[1]:.4s}s<extra></extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "showlegend": True,
        "xaxis": {"title": {"text": "seconds from the start of the step", "standoff": 8}, "rangemode": "tozero"},
        "yaxis": {
            "autorange": "reversed",
            "categoryorder": "array",
            "categoryarray": [f"rank {row}" for row in range(rows)],
        },
    }
    note = "The replica that is done last. In the gaps the pipeline rank waits."
    if len(bars) > len(shown):
        note += f" Only the first {MOST_BARS} of {len(bars)} actions are shown."
    return Chart(name, title, note, traces, layout, 140 + 30 * rows)


def write_timeline(target: Path, title: str, lines: Sequence[str], charts: Sequence[Chart]) -> None:
    """Write a timeline as one HTML file that needs no network and no other file.

    Args:
        target: file to write.
        lines: sentences above the charts.

    Raises:
        InputError: plotly is not installed.
        StorageError: the target cannot be written.
    """
    page = render_page("timeline.html.j2", title=title, lines=lines, charts=charts, plotly=plotly_script())
    write_text(target, page)
