"""Where the time of the ranks goes, as lines of a view: exposed communication, the slowest ranks, and a heat map of the
times by stage and device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hpctrain.base.units import format_seconds
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.binned_curve import block
from hpctrain.report.rank_times import SLOW, slowness
from hpctrain.report.watch.text_fit import LABEL, RankedLine, Screen, label, line

STAGES_MOST = 16
"""Most stages of the map, each on a line; of more stages, those of the longest times are shown."""
_HOT = 1.25
"""Factor of the median of its stage from which a device is drawn in red; from `SLOW` on it is yellow."""


def rank_lines(ranks: Sequence[RankRow], steps: Sequence[MetricRow], screen: Screen) -> Iterator[RankedLine]:
    """Yield the lines about the ranks; none without rows.

    Args:
        ranks: the newest row of each rank.
        steps: the newest rows of metrics.jsonl.
    """
    if not ranks:
        return
    waits = waits_text(ranks, steps)
    if waits:
        yield line(11, label("waits"), waits)
    slowest = slowest_text(ranks)
    if slowest:
        yield line(17, label("slowest"), slowest)
    yield from _heat_map(ranks, screen)


def waits_text(ranks: Sequence[RankRow], steps: Sequence[MetricRow]) -> str:
    """Return how much of a step the ranks wait, as a mean over the ranks; '' if it is not known.

    Exposed communication is the time of a step in which a rank waits for stage messages or for sums over replicas. On
    a GPU it cannot be told from other waits for the GPU.

    Args:
        ranks: the newest row of each rank, all of the same steps.
        steps: the newest rows of metrics.jsonl.
    """
    first = ranks[0].step - ranks[0].steps
    same = [row for row in steps if first < row.step <= ranks[0].step and row.generation == ranks[0].generation]
    if not same:
        return ""
    step_s = statistics.fmean(row.step_time_s for row in same)

    def share(*names: str) -> float:
        return 100 * statistics.fmean(sum(getattr(rank, name) for name in names) for rank in ranks) / step_s

    others = f"others {share('wait_world_s'):.0f} %"
    if any(rank.wait_device_s > 0 for rank in ranks):
        return f"GPU {share('wait_device_s'):.0f} %, {others} of a step"
    parts = {"sums": share("wait_dp_s"), "stages": share("wait_pp_s")}
    named = ", ".join(f"{name} {value:.0f} %" for name, value in parts.items() if value >= 0.5)
    exposed = f"exposed communication {sum(parts.values()):.0f} %" + (f" ({named})" if named else "")
    hidden = [f"hidden {share('hidden_dp_s'):.0f} %"] if share("hidden_dp_s") >= 0.5 else []
    return ", ".join([exposed, *hidden, others])


def slowest_text(ranks: Sequence[RankRow], most: int = 8) -> str:
    """Return at most `most` ranks that compute longer than the median of their peers, the slowest first, each with its
    excess in percent; '' if no rank does, or none has peers."""
    by_rank = slowness(ranks)
    ratios = [(by_rank[row.rank], row) for row in ranks if row.rank in by_rank]
    slow = sorted(((ratio, row) for ratio, row in ratios if ratio >= 1.005), key=lambda item: -item[0])[:most]
    return "  ".join(f"rank {row.rank} {row.device} +{100 * (ratio - 1):.0f} %" for ratio, row in slow)


def _heat_map(ranks: Sequence[RankRow], screen: Screen) -> Iterator[RankedLine]:
    """Yield a line for each stage with the time of each of its devices: named if the line has room, else as blocks."""
    stages: dict[int, list[tuple[str, float]]] = {}
    for row in ranks:
        for stage, forward_s, backward_s in zip(row.stages, row.forward_s, row.backward_s, strict=False):
            stages.setdefault(stage, []).append((row.device, forward_s + backward_s))
    most_s = max((seconds for cells in stages.values() for _, seconds in cells), default=0.0)
    longest = sorted(stages, key=lambda stage: -max(seconds for _, seconds in stages[stage]))[:STAGES_MOST]
    named = {stage: [f"{device} {format_seconds(seconds)}" for device, seconds in stages[stage]] for stage in longest}
    room = screen.width - LABEL
    is_named = all(sum(len(cell) + 4 for cell in cells) <= room + 2 for cells in named.values())
    for index, stage in enumerate(sorted(longest)):
        cells = [(block(seconds, 0.0, most_s), _colour(seconds, stages[stage])) for _, seconds in stages[stage]]
        parts: list[str | tuple[str, str]] = [label(f"stage {stage}")]
        if is_named:
            for cell, (mark, colour) in zip(named[stage], cells, strict=True):
                parts += [(mark, colour), f" {cell}  "]
        else:
            device, seconds = max(stages[stage], key=lambda item: item[1])
            words = f"  longest {format_seconds(seconds)} {device}"
            parts += [*_grouped(stages[stage], most_s, max(1, room - len(words))), words]
        yield line(19 + 2 * index, *parts)
    if len(stages) > len(longest):
        yield line(60, f"{'':<{LABEL}}{len(stages) - len(longest)} further stages have shorter times")


def _grouped(cells: Sequence[tuple[str, float]], most_s: float, room: int) -> Iterator[tuple[str, str]]:
    """Yield a block for each device, or where they are too many, for the slowest of several neighbours."""
    size = -(-len(cells) // room)
    for start in range(0, len(cells), size):
        seconds = max(seconds for _, seconds in cells[start : start + size])
        yield block(seconds, 0.0, most_s), _colour(seconds, cells)


def _colour(seconds: float, cells: Sequence[tuple[str, float]]) -> str:
    median = statistics.median(seconds for _, seconds in cells)
    if median <= 0 or seconds < SLOW * median:
        return "green"
    return "yellow" if seconds < _HOT * median else "red"
