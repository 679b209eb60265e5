"""What ranks do over time, as charts with a bar for each action."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.report.html.charts.chart import SpanChart
from hpctrain.report.timeline import KINDS, Bar

MOST_BARS = 20_000
"""Most bars of a chart; browsers scroll pages with so many without delay."""


def gantt_chart(name: str, title: str, bars: Sequence[Bar], rows: int) -> SpanChart:
    """Return a timeline as a chart with one horizontal bar for each action and one row for each pipeline rank.

    Args:
        name: name of the chart in the page.
        title: the chart's heading.
        bars: the actions of one replica.
        rows: number of pipeline ranks.
    """
    kinds = list(KINDS)
    note = "The replica that is done last. In the gaps the pipeline rank waits."
    if len(bars) > MOST_BARS:
        note += f" Only the first {MOST_BARS} of {len(bars)} actions are shown."
    return SpanChart(
        name, title, note, rows=[f"rank {row}" for row in range(rows)], kinds=list(KINDS.values()),
        bars=[(bar.row, kinds.index(bar.kind), bar.start_s, bar.end_s, bar.label) for bar in bars[:MOST_BARS]],
        height=150 + 30 * rows,
    )  # fmt: skip
