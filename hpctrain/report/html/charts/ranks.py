"""Figures of ranks: the heat map of their times over a run, and what they did in a recorded step."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.records.history.step_spans import RankSpans, SpanKind, StepSpans
from hpctrain.report.html.charts.chart import HeatMap, SpanChart
from hpctrain.report.html.charts.matrices import MOST_ROWS
from hpctrain.report.rank_history import RankHistory
from hpctrain.report.step_trace import PredictedSpan

MOST_COLUMNS = 100
"""Most windows of the heat map; of more, some at equal distances are shown."""
MOST_RANKS = 12
"""Most ranks of the timeline."""
MOST_RANK_SPANS = 400
"""Most operations of a rank in the timeline."""


def rank_heat_map(history: RankHistory) -> HeatMap | None:
    """Return the heat map of the seconds that each rank computes in a step; None with less than two ranks or windows.
    With more than `MOST_ROWS` ranks, a row is the slowest of several ranks."""
    stride = -(-len(history.windows) // MOST_COLUMNS) or 1
    windows = [{row.rank: row for row in window} for window in history.windows[::stride]]
    ranks = sorted({rank for window in windows for rank in window})
    if len(ranks) < 2 or len(windows) < 2:
        return None
    size = -(-len(ranks) // MOST_ROWS)
    blocks = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    cells = [
        [max((window[rank].compute_s for rank in block if rank in window), default=None) for window in windows]
        for block in blocks
    ]
    names = [str(block[0]) if len(block) == 1 else f"{block[0]} to {block[-1]}" for block in blocks]
    steps = [f"{next(iter(window.values())).step:,}" for window in windows]
    note = "Forward and backward passes, means over the steps up to the named one. An empty cell: no such rank then."
    if size > 1:
        note += f" A row has the slowest of {size} ranks."
    if not history.is_whole or stride > 1:
        note += f" {len(windows)} windows at equal distances are shown, not all."
    return HeatMap(
        "rank-times", "Compute time by rank (s)", note, x_title="step", y_title="rank", columns=steps, rows=names,
        cells=cells, unit="s", height=min(520, 150 + 18 * len(blocks)),
    )  # fmt: skip


_KINDS = (
    "forward", "backward", "waits for its GPU", "waits for stages", "waits for sums", "waits for all ranks",
    "other work",
)  # fmt: skip
_KIND_OF: dict[SpanKind, int] = {"device": 2, "pp": 3, "dp": 4, "world": 5}


def step_timeline(record: StepSpans, predicted: Sequence[PredictedSpan]) -> SpanChart:
    """Return the timeline of a recorded step, with the predicted one below each rank. Of many ranks, the one that
    computes longest and its neighbours are shown."""
    begun_s = min((start for rank in record.ranks for _, start, _, _ in rank.spans), default=0.0)
    shown = _shown_ranks(record.ranks)
    by_rank: dict[int, list[PredictedSpan]] = {}
    for span in predicted:
        by_rank.setdefault(span.rank, []).append(span)
    rows: list[str] = []
    bars: list[tuple[int, int, float, float, str]] = []
    for rank in shown:
        rows.append(f"rank {rank.rank}")
        spans = [span for span in rank.spans if span[3] != "hidden"][:MOST_RANK_SPANS]
        bars += [
            (len(rows) - 1, _kind(name, kind), start - begun_s, end - begun_s, name) for name, start, end, kind in spans
        ]
        if own := by_rank.get(rank.rank, [])[:MOST_RANK_SPANS]:
            rows.append("predicted")
            bars += [(len(rows) - 1, _kind(span.name, span.kind), span.start_s, span.end_s, span.name) for span in own]
    note = "Measured by the hosts. Sums beside the computation are left out; hpctrain trace has them."
    if predicted:
        note = f"Below each rank what the planner predicted for it. {note}"
    if len(shown) < len(record.ranks):
        note += f" {len(shown)} of {len(record.ranks)} ranks are shown, around the one that computes longest."
    title = f"What ranks did in step {record.step}"
    return SpanChart("timeline", title, note, rows, list(_KINDS), bars, height=150 + 26 * len(rows))


def _shown_ranks(ranks: Sequence[RankSpans]) -> list[RankSpans]:
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    computes = [sum(end - start for _, start, end, kind in rank.spans if kind == "compute") for rank in ranks]
    slowest = computes.index(max(computes))
    start = max(0, min(slowest - MOST_RANKS // 2, len(ranks) - MOST_RANKS))
    return list(ranks[start : start + MOST_RANKS])


def _kind(name: str, kind: SpanKind) -> int:
    if kind == "compute":
        return 0 if name.startswith("forward") else 1 if name.startswith("backward") else 6
    return _KIND_OF[kind]
