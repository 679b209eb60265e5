"""The actions of a step as bars over time: lines of letters for the terminal, or a Gantt chart in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from hpctrain.base.atomic import write_text
from hpctrain.report.charts import Chart, Trace, colour
from hpctrain.report.render import plotly_script, render_page

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
"""Most bars of a page; a browser can still scroll a page with so many."""


@dataclass(frozen=True)
class Bar:
    """One action in a row of a timeline, with its start and end in seconds."""

    row: int
    kind: str
    """Kind of the action, a key of KINDS."""
    label: str
    start_s: float
    end_s: float


def letters(bars: Sequence[Bar], rows: int, total_s: float, width: int) -> list[str]:
    """Return one line of `width` letters for each row. A letter is the kind of action that takes most of the column's
    time, or WAITS if there is none."""
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
    """Return the lines of `letters` in colour, each after its pipeline rank, and a legend below."""
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
    """Return a chart with one horizontal bar per action and one row per pipeline rank."""
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
    """Write the charts as one HTML file that needs no network and no other file.

    Raises:
        InputError: plotly is not installed.
        StorageError: the target cannot be written.
    """
    page = render_page("timeline.html.j2", title=title, lines=lines, charts=charts, plotly=plotly_script())
    write_text(target, page)
