"""Where the time of each rank went in the last steps, and which rank is slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import FileError
from hpctrain.records.format.input_file import read_jsonl_tail
from hpctrain.records.history.rank_log import RANK_LOG, RankRow

TAIL_BYTES = 1 << 22
"""Bytes at the end of metrics-ranks.jsonl that are read: about 10,000 lines."""
SLOW = 1.1
"""A rank is named as slow if it computes longer than this factor times the median of its peers."""


def read_last_rank_rows(folder: Path) -> list[RankRow]:
    """Return the newest row of each rank in metrics-ranks.jsonl of a run folder, in the order of ranks; [] without the
    file. Lines that this version of hpctrain cannot read are left out.

    Raises:
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    rows: list[RankRow] = []
    try:
        values = read_jsonl_tail(folder / RANK_LOG, TAIL_BYTES)
    except OSError:
        return []
    last = values[-1] if values else {}
    for value in values:
        if (value.get("step"), value.get("generation")) == (last.get("step"), last.get("generation")):
            try:
                rows.append(RankRow.from_json(value))
            except FileError:
                continue
    return sorted(rows, key=lambda row: row.rank)


def slowness(row: RankRow, rows: Sequence[RankRow]) -> float | None:
    """Return how many times as long as the median of its peers a rank computes; None without peers. Peers are the other
    ranks with the same stages.

    Args:
        rows: one row of each rank, of the same steps.
    """
    peers = [other.compute_s for other in rows if other.stages == row.stages and other.rank != row.rank]
    median = statistics.median(peers) if peers else 0.0
    return row.compute_s / median if median > 0 else None


def slow_rank_text(rows: Sequence[RankRow]) -> str | None:
    """Return a sentence that names the slowest rank and by how much it is slower than its peers; None if no rank is
    slow. The arguments are those of `slowness`."""
    known = [(ratio, row) for row in rows if (ratio := slowness(row, rows)) is not None]
    ratio, row = max(known, key=lambda item: item[0], default=(1.0, None))
    if row is None or ratio <= SLOW:
        return None
    return f"rank {row.rank} ({row.device}) computes {ratio:.2f} times as long as the median of its peers"
