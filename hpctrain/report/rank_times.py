"""Where the time of each rank went in the last steps, which rank is slow, and what was measured of each layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.records.format.file_tail import rows_of
from hpctrain.records.format.input_file import read_jsonl_tail
from hpctrain.records.history.layer_figures import LayerFigures, layers_of_ranks
from hpctrain.records.history.rank_log import RANK_LOG, RankRow

TAIL_BYTES = 1 << 22
"""Bytes at the end of metrics-ranks.jsonl that are read: about 10,000 lines."""
SLOW = 1.1
"""A rank is named as slow if it computes longer than this factor times the median of its peers."""


def read_last_rank_rows(folder: Path) -> list[RankRow]:
    """Return the rows of the newest steps in metrics-ranks.jsonl of a run folder, one for each rank, in the order of
    ranks; [] without the file. Lines that this version of hpctrain cannot read are left out.

    Raises:
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    return newest_rows(_tail(folder))


def read_last_layers(folder: Path) -> list[LayerFigures]:
    """Return the newest figures of each layer in metrics-ranks.jsonl of a run folder, over all ranks; [] if there are
    none.

    Raises:
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    return newest_layers(_tail(folder))


def _tail(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl_tail(folder / RANK_LOG, TAIL_BYTES)
    except OSError:
        return []


def newest_rows(values: Sequence[Mapping[str, Any]]) -> list[RankRow]:
    """Return the rows of the steps that the last line is about, in the order of ranks; [] without lines. Lines that
    this version of hpctrain cannot read are left out.

    Args:
        values: JSON objects of lines of metrics-ranks.jsonl, the oldest first.
    """
    return _rows_like(values, values[-1]) if values else []


def newest_layers(values: Sequence[Mapping[str, Any]]) -> list[LayerFigures]:
    """Return the newest figures of each layer in lines of metrics-ranks.jsonl, over all ranks; [] if there are none.
    The argument is that of `newest_rows`."""
    newest = next((value for value in reversed(values) if "layers" in value), None)
    return layers_of_ranks(row.layers or [] for row in _rows_like(values, newest)) if newest is not None else []


def _rows_like(values: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> list[RankRow]:
    """Return the rows of the step and generation of `one`, in the order of ranks."""
    steps = one.get("step"), one.get("generation")
    same = [value for value in values if (value.get("step"), value.get("generation")) == steps]
    return sorted(rows_of(RankRow, same), key=lambda row: row.rank)


def slowness(rows: Sequence[RankRow]) -> dict[int, float]:
    """Return rank -> how many times as long as the median of its peers it computes. Peers are the other ranks with the
    same stages; a rank without peers has no entry.

    Args:
        rows: one row of each rank, of the same steps.
    """
    peers: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        peers.setdefault(tuple(row.stages), []).append(row.compute_s)
    for times in peers.values():
        times.sort()
    ratios = {}
    for row in rows:
        times = peers[tuple(row.stages)]
        median = _median_of_others(times, bisect_left(times, row.compute_s))
        if median > 0:
            ratios[row.rank] = row.compute_s / median
    return ratios


def _median_of_others(ordered: Sequence[float], without: int) -> float:
    """Return the median of a list of ascending values without the one at a position; 0 if there is no other."""
    count = len(ordered) - 1
    if not count:
        return 0.0
    middle = ((count - 1) // 2, count // 2)
    return sum(ordered[at + (at >= without)] for at in middle) / 2


def slow_rank_text(rows: Sequence[RankRow]) -> str | None:
    """Return a sentence that names the slowest rank and by how much it is slower than its peers; None if no rank is
    slow. The arguments are those of `slowness`."""
    ratios = slowness(rows)
    row = max(rows, key=lambda row: ratios.get(row.rank, 0.0), default=None)
    if row is None or ratios.get(row.rank, 0.0) <= SLOW:
        return None
    return f"rank {row.rank} ({row.device}) computes {ratios[row.rank]:.2f} times as long as the median of its peers"
