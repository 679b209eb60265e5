"""The lines of many logs as one: merged by the time before each line, in a memory that does not grow with the files."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.log_timestamps import parse_timestamp
from hpctrain.base.owned_files import open_owned

BLOCK_BYTES = 32 * 1024
"""Read at once. A longer line counts as several: a file without line breaks must not fill the memory."""
LOOK_BACK_BYTES = 2**20
"""How far back a stamp is looked for that belongs to the lines at the end of a file."""
POLL_S = 0.5
POLL_MAX_S = 5.0
"""Between two looks at the files: doubled up to this while nothing is written."""


@dataclass(frozen=True)
class LogLine:
    """A line of a log."""

    time_s: float
    """When it was written, seconds since 1970. A line without a stamp has that of the one before it, as a rule."""
    source: str
    """Where it comes from, for a person: `0/node1.0` is the first worker of node1 in attempt 0."""
    text: str


@dataclass(frozen=True)
class LogFile:
    """A log, or the part of it that was asked for."""

    path: Path
    source: str
    spans: tuple[tuple[float, float], ...] | None = None
    """Only lines of these times, from and to, seconds since 1970. None: all of them."""
    is_script: bool = False
    """Of a job's script: the attempt's beginning and its end have stamps, hours apart, and what srun and Slurm say in
    between is about the end. A line without a stamp has that of the next one here, the last lines that of the file."""

    def holds(self, time_s: float) -> bool:
        """Whether a line of that time was asked for."""
        return self.spans is None or any(start <= time_s < end for start, end in self.spans)


class LogReader:
    """Reads on in a log from where it stopped. It keeps no file open: a large run has thousands of logs."""

    def __init__(self, file: LogFile, offset: int = 0) -> None:
        self.file = file
        self._offset = offset
        self._time_s: float | None = None
        self._looked_around = False

    def lines(self, rest: bool = True) -> Iterator[LogLine]:
        """The lines up to the present end of the file.

        Args:
            rest: give out a last line that is not whole too. Otherwise it waits for its end.
        """
        while block := _block(self.file.path, self._offset):
            used = block.rfind(b"\n") + 1
            if not used and len(block) < BLOCK_BYTES and not rest:
                return
            whole = block[:used] if used else block
            lines = whole.removesuffix(b"\n").split(b"\n")
            stamped = [parse_timestamp(line) for line in lines]
            times = self._times([found[0] if found is not None else None for found in stamped])
            self._offset += len(whole)
            for line, found, time_s in zip(lines, stamped, times, strict=True):
                text = found[1] if found is not None else line
                if self.file.holds(time_s):
                    yield LogLine(time_s, self.file.source, text.decode(errors="replace").rstrip("\r"))

    def _times(self, stamps: Sequence[float | None]) -> list[float]:
        """The time of each line of a block, from the stamps of those that have one."""
        if self.file.is_script:
            return _filled(stamps[::-1], _modified(self.file.path))[::-1]
        times = _filled(stamps, self._time_of_first())
        if any(stamp is not None for stamp in stamps):
            self._time_s = times[-1]
        return times

    def _time_of_first(self) -> float:
        """The time of the next line, should it have no stamp."""
        if self._time_s is None and not self._looked_around:
            self._looked_around = True
            self._time_s = _stamp_near(self.file.path, self._offset)
        # A file that has no stamps so far tells by its own time when the newest lines came.
        return self._time_s if self._time_s is not None else _modified(self.file.path)


def last_lines(
    files: Iterable[LogFile], count: int | None, rest: bool = True
) -> tuple[list[LogReader], Iterable[LogLine]]:
    """The last lines of all logs taken together, and readers that go on behind them once these were taken out.

    Args:
        count: how many; None: every line.
        rest: with last lines that are not whole; where the logs are followed, those come later.
    """
    readers = [LogReader(file, _start(file, count)) for file in files]
    merged = heapq.merge(*(reader.lines(rest) for reader in readers), key=lambda line: line.time_s)
    return readers, merged if count is None else deque(merged, maxlen=count)


def follow_lines(
    readers: Iterable[LogReader],
    find: Callable[[], list[LogFile]],
    clock: Clock,
    over: Callable[[], bool],
) -> Iterator[LogLine]:
    """New lines as they are written, ordered by time as far as they are seen together.

    Args:
        readers: those of the logs that are known, at the places to go on from.
        find: all logs at present; those that come later (a new attempt, a new job) are read from their beginning.
        over: whether the run has ended: asked before each look, after which the iteration then ends.
    """
    known = {reader.file.path: reader for reader in readers}
    delay_s, ended = POLL_S, False
    while not ended:
        ended = over()
        for file in find():
            known.setdefault(file.path, LogReader(file)).file = file
        new = [line for reader in known.values() for line in reader.lines(rest=ended)]
        yield from sorted(new, key=lambda line: line.time_s)
        delay_s = POLL_S if new else min(2 * delay_s, POLL_MAX_S)
        if not ended:
            clock.sleep(delay_s)


def _filled(stamps: Sequence[float | None], first: float) -> list[float]:
    """Each stamp, and in place of one that is not there the stamp before it; `first` where there is none."""
    return list(accumulate(stamps, lambda before, stamp: before if stamp is None else stamp, initial=first))[1:]


def _start(file: LogFile, count: int | None) -> int:
    """Where to begin for the last `count` lines. What lies outside the spans would be counted, so those begin at 0."""
    return 0 if count is None or file.spans is not None else _tail_offset(file.path, count)


def _tail_offset(path: Path, count: int) -> int:
    """Where the last `count` lines begin, found by counting line breaks from the end; lines too long count as more."""
    end = _size(path)
    left = count + (_block(path, max(0, end - 1)) == b"\n")
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        block = _block(path, start)[: end - start]
        breaks = block.count(b"\n")
        if breaks >= left:
            at = len(block)
            for _ in range(left):
                at = block.rfind(b"\n", 0, at)
            return start + at + 1
        left -= max(breaks, 1)
        end = start
        if left <= 0:
            return end
    return 0


def _stamp_near(path: Path, offset: int) -> float | None:
    """The stamp that a line without one at `offset` belongs to: the last before it, else the first behind it."""
    start = max(0, offset - LOOK_BACK_BYTES)
    end = offset
    while end > start:
        begin = max(start, end - BLOCK_BYTES)
        stamps = _stamps(_block(path, begin)[: end - begin])
        if stamps:
            return stamps[-1]
        end = begin
    stamps = _stamps(_block(path, offset))
    return stamps[0] if stamps else None


def _stamps(block: bytes) -> list[float]:
    return [found[0] for line in block.split(b"\n") if (found := parse_timestamp(line)) is not None]


def _block(path: Path, offset: int) -> bytes:
    """At most a block from `offset` on; nothing of a file that is gone or may not be read."""
    try:
        descriptor = open_owned(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, BLOCK_BYTES, offset)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
