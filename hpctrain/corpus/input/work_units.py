"""Divides the input into work units of about equal size; the division depends only on the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.corpus.input.compressed_input import is_compressed

Format = Literal["text", "jsonl", "parquet", "arrow"]

UNIT_BYTES = (16 * 1024 * 1024, 1024 * 1024 * 1024)
"""Smallest and largest size of a unit in bytes. With small units, a killed command loses little work; with large ones,
there are fewer shards."""
UNITS = 1024
"""Approximate number of units of a large corpus. Each makes at least one shard, and a process can memory-map some ten
thousand."""


@dataclass(frozen=True)
class InputFile:
    """An input file and its format."""

    path: Path
    format: Format


@dataclass(frozen=True)
class FileRange:
    """An input file, or a part of it."""

    path: Path
    format: Format
    size_bytes: int
    """Size of the file or part on disk."""
    start: int = 0
    """First byte of the part (its first line begins there or later), or number of its first row group."""
    stop: int | None = None
    """Byte or row group at which the next part begins; None for the end of the file."""


WorkUnit = tuple[FileRange, ...]
"""The files and parts of files that one process prepares as one task."""


def unit_bytes(total_bytes: int) -> int:
    """Return the size of a work unit in bytes on disk, for `total_bytes` of input."""
    low, high = UNIT_BYTES
    return min(max(total_bytes // UNITS, low), high)


def plan_work_units(
    files: Sequence[tuple[InputFile, int]], size_bytes: int, row_groups: Callable[[Path], list[int]]
) -> list[WorkUnit]:
    """Return units of about `size_bytes`, in the order of the files (each with its size).

    Small files are combined. Large ones are cut where their format allows it: at line ends, or between row groups. A
    compressed file stays whole, because it is read from its beginning.
    """
    units: list[WorkUnit] = []
    held: list[FileRange] = []
    for file, size in files:
        if size > size_bytes:
            if held:
                units.append(tuple(held))
                held = []
            units.extend((piece,) for piece in _cut(file, size, size_bytes, row_groups))
            continue
        held.append(FileRange(file.path, file.format, size))
        if sum(piece.size_bytes for piece in held) >= size_bytes:
            units.append(tuple(held))
            held = []
    return [*units, tuple(held)] if held else units


def _cut(file: InputFile, size: int, size_bytes: int, row_groups: Callable[[Path], list[int]]) -> Iterator[FileRange]:
    if file.format in ("text", "jsonl") and not is_compressed(file.path):
        starts = [size * n // math.ceil(size / size_bytes) for n in range(math.ceil(size / size_bytes))]
        sizes = [to - start for start, to in zip(starts, [*starts[1:], size], strict=True)]
    else:
        sizes_of_groups = row_groups(file.path) if file.format == "parquet" else []
        starts, sizes = [0], [0]
        for number, group in enumerate(sizes_of_groups):
            if sizes[-1] >= size_bytes:
                starts.append(number)
                sizes.append(0)
            sizes[-1] += group
        # Row groups have uncompressed sizes; progress counts bytes on disk, so they are scaled to the file's size.
        whole = max(1, sum(sizes))
        sizes = [size * part // whole for part in sizes] if sizes_of_groups else [size]
    stops = [*starts[1:], None]
    for start, stop, part in zip(starts, stops, sizes, strict=True):
        yield FileRange(file.path, file.format, part, start, stop)
