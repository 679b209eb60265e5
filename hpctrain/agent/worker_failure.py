"""Why a worker ended, as its agent records it.

The cause is in the worker's report. Without a report, it may be in the kernel's log or at the end of the worker's log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.agent.worker_messages import WorkerError
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named, fault_of, xid_of


@dataclass(frozen=True)
class WorkerFailure:
    """An error that ended a worker."""

    rank: int
    sentence: str
    """One line for a person: which rank did what, kind, message and place of the error."""
    fault: Fault
    """Whose fault it is."""
    details: dict[str, Any] = field(default_factory=dict)
    """kind, message (whole), where, step and operation, as far as the worker reported them."""

    def to_event(self) -> dict[str, Any]:
        """Return the data of an event about this failure."""
        return {"rank": self.rank, "fault": self.fault.name, "error": self.details}


def failure_from_evidence(reported: WorkerFailure | None, rank: int, fault: Fault, line: str) -> WorkerFailure:
    """Return the failure of a worker that did not report whose fault its end was.

    Args:
        reported: the worker's own report, if any.
        line: the log line that names the fault.
    """
    sentence = f"rank {rank}: {fault.words}: {line}"
    if reported is None:
        return WorkerFailure(rank, sentence, fault, {"message": line})
    return WorkerFailure(rank, f"{reported.sentence}; {sentence}", fault, reported.details)


def failure_from_report(rank: int, report: WorkerError) -> WorkerFailure:
    """Return the failure that a worker reports."""
    return WorkerFailure(rank, report.sentence, fault_named(report.fault), report.details.to_json())


KERNEL_LOG = Path("/dev/kmsg")
"""Each read returns one record. Only root may read it under kernel.dmesg_restrict; most containers lack it."""
KERNEL_LOG_WINDOW_S = 600.0
"""How long before a worker's end the kernel may have logged the cause; NCCL waits for so long by default."""
LOG_TAIL_BYTES = 1 << 16
_READ_BYTES = 1 << 13
_MOST_READS = 20_000
_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;(.*)$")
"""Priority, number, microseconds since boot; message. Documentation/ABI/testing/dev-kmsg of the Linux kernel."""
_ABORT = "terminate called after throwing"
"""The message of C++ for an uncaught exception; torch's NCCL watchdog ends a process in this way."""


def hardware_fault(since_s: float, kernel_log: Path = KERNEL_LOG) -> tuple[Fault, str] | None:
    """Return the first hardware fault of this node since a time, with its log line; None where the log has none or may
    not be read.

    Args:
        since_s: seconds on the monotonic clock.
    """
    for stamp_s, line in _kernel_lines(kernel_log):
        if stamp_s >= since_s and xid_of(line) is not None and (fault := fault_of(line)).names_a_node:
            return fault, line
    return None


def abort_cause(log: Path, start: int) -> tuple[Fault, str] | None:
    """Return the fault that made a worker abort, with the text at the end of the worker's log; None where the log shows
    no abort.

    Args:
        start: bytes of the log that earlier workers wrote.
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
                continue  # the record was overwritten; the next read returns the oldest one that remains
            except OSError:
                return  # no more for now, or not readable
            if not content:
                return
            for line in content.split(b"\n"):
                record = _RECORD.match(line)
                if record is not None:
                    yield int(record[1]) / 1e6, record[2].decode(errors="replace")
    finally:
        os.close(descriptor)
