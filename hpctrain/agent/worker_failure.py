"""Why a worker ended, as the node's agent records it.

The cause is in the worker's report. If the report blames no node, or there is none, the kernel's log is read, too. If a
worker aborted without a report, so is the end of its log.
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
    """Row of the fault table: what is to blame."""
    details: dict[str, Any] = field(default_factory=dict)
    """The keys kind, message (whole), where, step and operation, as far as the worker reported them."""

    def to_event(self) -> dict[str, Any]:
        """Return the keys `rank`, `fault` and `error` of an event about the failure."""
        return {"rank": self.rank, "fault": self.fault.name, "error": self.details}


def failure_from_evidence(reported: WorkerFailure | None, rank: int, fault: Fault, line: str) -> WorkerFailure:
    """Return the failure of a worker for whose end a log names the fault.

    Args:
        reported: the failure that the worker reported; None if it reported none. Its sentence and details stay in the
            result, its fault does not.
        fault: the fault that the log names.
        line: text of the log that names the fault.
    """
    sentence = f"rank {rank}: {fault.words}: {line}"
    if reported is None:
        return WorkerFailure(rank, sentence, fault, {"message": line})
    return WorkerFailure(rank, f"{reported.sentence}; {sentence}", fault, reported.details)


def failure_from_report(rank: int, report: WorkerError) -> WorkerFailure:
    """Return the failure that the worker of `rank` reported."""
    return WorkerFailure(rank, report.sentence, fault_named(report.fault), report.details.to_json())


KERNEL_LOG = Path("/dev/kmsg")
"""Device file of the kernel's log. Each read returns one record. Only root may read the file under
kernel.dmesg_restrict; most containers lack it."""
KERNEL_LOG_WINDOW_S = 600.0
"""How many seconds before a worker's end the kernel may have logged the cause: NCCL by default waits for so long."""
LOG_TAIL_BYTES = 1 << 16
"""Bytes at the end of a worker's log that are searched."""
_READ_BYTES = 1 << 13
_MOST_READS = 20_000
_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;(.*)$")
"""A record of the kernel's log: priority, number, microseconds since boot; message. See
Documentation/ABI/testing/dev-kmsg of the Linux kernel."""
_ABORT = "terminate called after throwing"
"""The message of C++ for an uncaught exception; torch's NCCL watchdog ends a process in this way."""


def hardware_fault(since_s: float, kernel_log: Path = KERNEL_LOG) -> tuple[Fault, str] | None:
    """Return (fault, log line) of the first error of NVIDIA's driver (Xid) since a time that blames this node; None if
    the kernel's log has none or may not be read.

    Args:
        since_s: seconds on the monotonic clock.
        kernel_log: the file in which the kernel reports errors of devices.
    """
    for stamp_s, line in _kernel_lines(kernel_log):
        if stamp_s >= since_s and xid_of(line) is not None and (fault := fault_of(line)).names_a_node:
            return fault, line
    return None


def abort_cause(log: Path, start: int) -> tuple[Fault, str] | None:
    """Return (fault, text) for a worker that aborted: the fault, and the text at the end of the worker's log that names
    it. None if the log shows no abort or names no fault.

    Args:
        log: the log file of the worker's device, to which earlier workers also wrote.
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
