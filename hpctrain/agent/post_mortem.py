"""What a worker left behind that could not say whose fault its end was: the kernel's log, and the last of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpctrain.records.history.fault import EXCEPTION, Fault, fault_of, xid_of

KERNEL_LOG = Path("/dev/kmsg")
"""One record a read; refused where only root may look (kernel.dmesg_restrict), absent in most containers."""
KERNEL_LOG_WINDOW_S = 600.0
"""How long before a worker's end the kernel may have told what ended it; NCCL waits for so long by default."""
LOG_TAIL_BYTES = 1 << 16
_READ_BYTES = 1 << 13
_MOST_READS = 20_000
_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;(.*)$")
"""Priority, number, microseconds since boot; message. Documentation/ABI/testing/dev-kmsg of the Linux kernel."""
_ABORT = "terminate called after throwing"
"""What C++ says when nobody catches an error: torch's watchdog of NCCL ends a process in this way."""


def hardware_fault(since_s: float, kernel_log: Path = KERNEL_LOG) -> tuple[Fault, str] | None:
    """The first fault of this node's hardware since a time, with the line that tells of it; None where the log has none
    or may not be read.

    Args:
        since_s: seconds on the monotonic clock.
    """
    for stamp_s, line in _kernel_lines(kernel_log):
        if stamp_s >= since_s and xid_of(line) is not None and (fault := fault_of(line)).names_a_node:
            return fault, line
    return None


def abort_cause(log: Path, start: int) -> tuple[Fault, str] | None:
    """Whose fault an abort was, with what was said of it at the end of a worker's log; None where nothing was.

    Args:
        start: bytes of the log that are of earlier workers.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    _, abort, words = text.rpartition(_ABORT)
    fault = fault_of(words)
    return (fault, " ".join(words.split())[:500]) if abort and fault.name != EXCEPTION else None


def _kernel_lines(path: Path) -> Iterator[tuple[float, str]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        for _ in range(_MOST_READS):
            try:
                content = os.read(descriptor, _READ_BYTES)
            except BrokenPipeError:
                continue  # the record was overwritten; the next read has the oldest that is left
            except OSError:
                return  # no more for now, or not for us
            if not content:
                return
            for line in content.split(b"\n"):
                record = _RECORD.match(line)
                if record is not None:
                    yield int(record[1]) / 1e6, record[2].decode(errors="replace")
    finally:
        os.close(descriptor)
