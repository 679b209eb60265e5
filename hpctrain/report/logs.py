"""Finds the logs of a run by attempt, node or rank, and merges their lines by timestamps, with bounded memory."""

from __future__ import annotations

import heapq
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError, InputError
from hpctrain.base.output_streams import parse_timestamp
from hpctrain.base.owned_files import open_owned
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.plan.plan import Plan

BLOCK_BYTES = 32 * 1024
"""Bytes of one read. A longer line counts as several lines, so that a file without line breaks cannot fill
the memory."""
LOOK_BACK_BYTES = 2**20
"""Most bytes that are searched backwards from a line without a timestamp for the timestamp of an earlier line."""
POLL_S = 0.5
POLL_MAX_S = 5.0
"""Longest pause in seconds between two polls; the pause doubles up to this value while nothing is written."""


@dataclass(frozen=True)
class LogLine:
    """A line of a log, without its timestamp."""

    time_s: float
    """Time of the line, in seconds since 1970. A line without a timestamp gets that of the line before it, or in the
    log of a job script that of the line after it (`LogFile.is_script`)."""
    source: str
    """Name of the log for people: `0/node1.0` is the first worker of node1 in attempt 0."""
    text: str


@dataclass(frozen=True)
class LogFile:
    """A log of a run. `spans` selects the lines of some intervals of time, in seconds since 1970; None: all lines."""

    path: Path
    source: str
    """Name of the log in printed lines."""
    spans: tuple[tuple[float, float], ...] | None = None
    """Intervals (from, to) whose lines are selected, in seconds since 1970. None: all lines."""
    is_script: bool = False
    """Whether the log is that of a job script. Only the first and the last lines of an attempt have timestamps there,
    hours apart, and the output of srun and Slurm between them belongs to the end. So a line without a timestamp gets
    that of the next line with one, and the last lines get the file's modification time. In other logs, a line gets the
    timestamp of the line before."""

    def holds(self, time_s: float) -> bool:
        """Return whether the log's selection (`spans`) includes a line of this time, in seconds since 1970."""
        return self.spans is None or any(start <= time_s < end for start, end in self.spans)


class LogReader:
    """Reads a log from where the last read stopped. It leaves no file open between reads, because a large run has
    thousands of logs."""

    def __init__(self, file: LogFile, offset: int = 0) -> None:
        self.file = file
        self._offset = offset
        self._time_s: float | None = None
        self._looked_around = False

    def lines(self, rest: bool = True) -> Iterator[LogLine]:
        """Yield the selected lines from the last read's position up to the present end of the file.

        Args:
            rest: include a last line without a line break; if False, it is read once it is complete.

        Raises:
            UntrustedError: another user owns the log or its folder, or can write to it.
        """
        while block := _block(self.file.path, self._offset):
            used = block.rfind(b"\n") + 1
            if not used and len(block) < BLOCK_BYTES and not rest:
                return
            whole = block[:used] if used else block
            lines = whole.removesuffix(b"\n").split(b"\n")
            stamped = [parse_timestamp(line) for line in lines]
            times = self._times([stamp[0] if stamp is not None else None for stamp in stamped])
            self._offset += len(whole)
            for line, stamp, time_s in zip(lines, stamped, times, strict=True):
                text = stamp[1] if stamp is not None else line
                if self.file.holds(time_s):
                    yield LogLine(time_s, self.file.source, text.decode(errors="replace").rstrip("\r"))

    def _times(self, stamps: Sequence[float | None]) -> list[float]:
        """Return the time of each line of one read, in seconds since 1970.

        A line without a timestamp gets that of the line before it, in the log of a job script that of the line after
        it.

        Args:
            stamps: timestamp of each line; None for a line without one.
        """
        if self.file.is_script:
            return _filled(stamps[::-1], _modified(self.file.path))[::-1]
        times = _filled(stamps, self._time_of_first())
        if any(stamp is not None for stamp in stamps):
            self._time_s = times[-1]
        return times

    def _time_of_first(self) -> float:
        """Return the time that the next line gets if it has no timestamp, in seconds since 1970."""
        if self._time_s is None and not self._looked_around:
            self._looked_around = True
            self._time_s = _stamp_near(self.file.path, self._offset)
        # Without any timestamp so far, the file's modification time is that of its newest lines.
        return self._time_s if self._time_s is not None else _modified(self.file.path)


def last_lines(
    files: Iterable[LogFile], count: int | None, rest: bool = True
) -> tuple[list[LogReader], Iterable[LogLine]]:
    """Return (readers, lines). `lines` are the last lines of all logs together, merged by time; `readers`, one for each
    log, continue after these lines. Consume the lines before you use the readers.

    Args:
        count: number of lines of all logs together; None: all lines.
        rest: include last lines without a line break. False if `follow_lines` comes next, which yields such a line when
            it is complete.

    Raises:
        UntrustedError: another user owns a log or its folder, or can write to it; some logs are read only while `lines`
            is consumed.
    """
    readers = [LogReader(file, _start(file, count)) for file in files]
    merged = heapq.merge(*(reader.lines(rest) for reader in readers), key=lambda line: line.time_s)
    return readers, merged if count is None else deque(merged, maxlen=count)


def follow_lines(
    readers: Iterable[LogReader], find: Callable[[], list[LogFile]], clock: Clock, over: Callable[[], bool]
) -> Iterator[LogLine]:
    """Yield new lines of all logs as they are written, sorted by time within each poll.

    Args:
        readers: readers of the known logs, at the positions to continue from.
        find: returns all logs that exist; a new one (of a new attempt or job) is read from its beginning.
        over: whether the run has ended; checked before each poll, and the iteration ends after that poll.

    Raises:
        UntrustedError: another user owns a log or its folder, or can write to it.
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
    """Return the timestamps with each None replaced by the last timestamp before it, or by `first` if there is none
    before it."""
    return list(accumulate(stamps, lambda before, stamp: before if stamp is None else stamp, initial=first))[1:]


def _start(file: LogFile, count: int | None) -> int:
    """Return the offset in bytes from which to read the last `count` lines of a log.

    The offset is 0 if `count` is None (all lines), or if `file.spans` selects lines by time, because then only selected
    lines count.
    """
    return 0 if count is None or file.spans is not None else _tail_offset(file.path, count)


def _tail_offset(path: Path, count: int) -> int:
    """Return the offset in bytes at which a file's last `count` lines begin. A line longer than `BLOCK_BYTES` counts as
    several lines.
    """
    end = _size(path)
    missing = count + (_block(path, max(0, end - 1)) == b"\n")
    for start, block in _blocks_before(path, end):
        breaks = block.count(b"\n")
        if breaks >= missing:
            at = len(block)
            for _ in range(missing):
                at = block.rfind(b"\n", 0, at)
            return start + at + 1
        missing -= max(breaks, 1)
        if missing <= 0:
            return start
    return 0


def _stamp_near(path: Path, offset: int) -> float | None:
    """Return the time of a line without a timestamp at `offset`, in seconds since 1970: the last timestamp within
    `LOOK_BACK_BYTES` before the line, else the first one in the `BLOCK_BYTES` from the line on; None without both."""
    for _, block in _blocks_before(path, offset, LOOK_BACK_BYTES):
        if stamps := _stamps(block):
            return stamps[-1]
    return next(iter(_stamps(_block(path, offset))), None)


def _blocks_before(path: Path, end: int, most_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of the blocks of a file, from the offset `end` backwards.

    Args:
        end: offset in bytes at which the first yielded block, the last one in the file, ends.
        most_bytes: largest number of bytes in all blocks together; None: up to the file's start.
    """
    first = 0 if most_bytes is None else max(0, end - most_bytes)
    while end > first:
        start = max(first, end - BLOCK_BYTES)
        yield start, _block(path, start)[: end - start]
        end = start


def _stamps(block: bytes) -> list[float]:
    return [stamp[0] for line in block.split(b"\n") if (stamp := parse_timestamp(line)) is not None]


def _block(path: Path, offset: int) -> bytes:
    """Return at most `BLOCK_BYTES` bytes of the file from `offset` on; b"" if the file is gone or may not be read.

    Raises:
        UntrustedError: another user owns the file or its folder, or can write to it.
    """
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


def find_logs(
    folder: Path, node: str | None = None, rank: int | None = None, attempt: int | None = None
) -> list[LogFile]:
    """Return the logs of a run: those of its job scripts, agents and workers.

    Args:
        folder: run folder.
        node: only the logs of this node's agent and workers.
        rank: only the output of this global rank. Which worker has the rank may change with the generation.
        attempt: only this attempt. A job script and its agents write one log for all attempts of a job, which is then
            included.

    Raises:
        InputError: workers were started, and none of them had the rank `rank`.
        FileError, UntrustedError: a file of the run is damaged, or is not trusted.
    """
    logs = folder / "logs"
    if rank is not None:
        files = _of_rank(folder, rank)
    else:
        paths = sorted(logs.rglob("*.log"))
        files = [LogFile(path, _source(path, logs), is_script=path.name.endswith(".job.log")) for path in paths]
    if attempt is not None:
        jobs = _jobs(folder, attempt)
        files = [file for file in files if _of_attempt(file.path.relative_to(logs), attempt, jobs)]
    return [file for file in files if node is None or _of_node(file.path.name, node)]


def _source(path: Path, logs: Path) -> str:
    return str(path.relative_to(logs).with_suffix(""))


def _jobs(folder: Path, attempt: int) -> set[str]:
    lines = read_jsonl(folder / "attempts.jsonl")
    return {str(line.get("job_id")) for line in lines if line.get("attempt") == attempt}


def _of_attempt(path: Path, attempt: int, jobs: set[str]) -> bool:
    """Return whether a log belongs to an attempt: it lies in the attempt's folder, or is a log of the attempt's job.

    Args:
        path: the log's path within the folder `logs`.
        jobs: id of the attempt's job, the only item; empty if attempts.jsonl has no line of the attempt.
    """
    if len(path.parts) > 1:
        return path.parts[0] == str(attempt)
    return path.name.partition(".")[0] in jobs


def _of_node(name: str, node: str) -> bool:
    """Return whether a log of this file name is of the node: NODE.NUMBER.log of a worker, NODE.agent.log or
    JOB.NODE.agent.log of an agent."""
    if re.fullmatch(rf"{re.escape(node)}\.\d+\.log", name):
        return True
    # Slurm uses the short host name in the names of log files.
    return any(re.fullmatch(rf"(\d+\.)?{re.escape(form)}\.agent\.log", name) for form in (node, node.split(".")[0]))


def _of_rank(folder: Path, rank: int) -> list[LogFile]:
    """Return the logs of the workers that had this rank, each limited to the generations in which it had the rank.

    Raises:
        InputError: workers were started, and none of them had this rank.
    """
    starts = [event for event in read_events(folder / "events.jsonl") if event.kind == "generation_started"]
    spans: dict[Path, list[tuple[float, float]]] = {}
    most = 0
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        ranks = _ranks(folder, start)
        most = max(most, len(ranks))
        if rank < len(ranks):
            end = following.time_s if following is not None else math.inf
            spans.setdefault(_worker_log(folder, start.attempt, ranks, rank), []).append((start.time_s, end))
    if most and not spans:
        raise InputError(f"--rank: found {rank}; the run's plans have ranks 0 to {most - 1}")
    logs = folder / "logs"
    return [
        LogFile(path, f"{_source(path, logs)} (rank {rank})", tuple(times))
        for path, times in spans.items()
        if path.exists()
    ]


def _ranks(folder: Path, start: Event) -> Sequence[DeviceId]:
    """Return the device of each rank in a generation; [] if the generation's plan cannot be read.

    Args:
        start: the event `generation_started` of the generation.
    """
    try:
        return Plan.read(folder / str(start.data.get("plan", "plan.json")), owned=True).ranks
    except FileError:
        return []


def _worker_log(folder: Path, attempt: int, ranks: Sequence[DeviceId], rank: int) -> Path:
    """Return the path of the log of a rank's worker; the workers of a node are numbered in the order of their ranks.

    Args:
        ranks: the device of each rank.
    """
    node = ranks[rank].node
    local = sum(device_id.node == node for device_id in ranks[:rank])
    return folder / "logs" / str(attempt) / f"{node}.{local}.log"
