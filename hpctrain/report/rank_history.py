"""The times of all ranks over a run, from metrics-ranks.jsonl. Of a long file, parts at equal distances are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.base.owned_files import open_owned
from hpctrain.records.format.file_tail import rows_of
from hpctrain.records.format.input_file import parse_json_line
from hpctrain.records.history.rank_log import RANK_LOG, RankRow

READ_BYTES = 8 << 20
"""Most bytes of the file that are read: about 25,000 lines."""
MOST_WINDOWS = 60
"""Most windows that are read of a file of more than `READ_BYTES`."""


@dataclass(frozen=True)
class RankHistory:
    """Windows of steps with a row for each rank, in the order of the file."""

    windows: list[list[RankRow]]
    is_whole: bool
    """Whether the whole file was read."""


def read_rank_history(folder: Path, ranks: int) -> RankHistory:
    """Return the windows of metrics-ranks.jsonl in which at least half of the ranks have a row. Lines that this version
    of hpctrain cannot read are left out.

    Args:
        ranks: number of ranks of the newest window.

    Raises:
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    try:
        file = os.fdopen(open_owned(folder / RANK_LOG), "rb")
    except OSError:
        return RankHistory([], True)
    with file:
        size = os.fstat(file.fileno()).st_size
        values = list(_lines(file, size, ranks))
    windows: dict[tuple[int, int], dict[int, RankRow]] = {}
    for row in rows_of(RankRow, values):
        windows.setdefault((row.step, row.generation), {})[row.rank] = row
    complete = [list(rows.values()) for rows in windows.values() if 2 * len(rows) >= ranks]
    return RankHistory(complete, size <= READ_BYTES)


def _lines(file: BinaryIO, size: int, ranks: int) -> Iterator[Any]:
    """Yield the JSON values of lines: of all, or of parts that each hold a whole window."""
    if size <= READ_BYTES:
        yield from filter(None, map(parse_json_line, file))
        return
    length = len(file.readline())
    part = 2 * ranks * length
    count = max(1, min(MOST_WINDOWS, READ_BYTES // part))
    for number in range(count):
        file.seek((size - part) * number // max(1, count - 1) if size > part else 0)
        file.readline()  # the rest of a line
        lines = [value for value in map(parse_json_line, file.read(part).splitlines()) if value is not None]
        middle = lines[len(lines) // 2].get("step") if lines else None
        yield from (value for value in lines if value.get("step") == middle)
