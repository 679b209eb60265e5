"""A process's current activity, in a record that another process can read even while this one hangs.

A worker keeps the record in memory that it shares with its agent. Reading it needs no answer from the worker, so it
works also when the worker is stopped, or stuck inside a library that holds the GIL.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

RECORD_BYTES = 256
OPERATION_BYTES = 160
_READS = 8


class ActivityRecord(NamedTuple):
    """The current activity of a process."""

    step: int = 0
    """The optimizer step under way, 1 is the first; 0 before that."""
    operation: str = "start"
    """Name of the operation, as in a profile: 'recv output of stage 0 mb 3 from rank 0'."""
    waits: bool = False
    """Whether the operation ends only when another process does its part."""
    since_s: float = 0.0
    """When the operation began: seconds on this machine's monotonic clock."""

    def words(self) -> str:
        """Return the operation for a person, without the abbreviations of a profile."""
        return self.operation.replace(" mb ", " micro-batch ")


class Activity:
    """The record of this process, written by the thread that trains; a change costs about a microsecond."""

    def __init__(self) -> None:
        self.now = ActivityRecord()
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        """Function that opens a span of the given name in torch's profile; None while no profiler runs."""
        self._page: mmap.mmap | None = None

    def share(self, descriptor: int) -> None:
        """Write the record to shared memory from now on; `descriptor` comes from `shared_record`."""
        self._page = mmap.mmap(descriptor, RECORD_BYTES)
        self.write(self.now)

    def begin_step(self, step: int) -> None:
        """Record that the process has begun this optimizer step."""
        self.write(ActivityRecord(step, f"step {step}", False, time.monotonic()))

    def doing(self, operation: str, waits: bool = False) -> _Operation:
        """Return a context manager that records an operation; while a profiler runs, it also opens a span. When the
        operation fails, the record stays unchanged and shows what failed."""
        return _Operation(self, operation, waits)

    def write(self, doing: ActivityRecord) -> None:
        """Replace the record by `doing`."""
        self.now = doing
        if self._page is not None:
            operation = doing.operation.replace("\n", " ").encode()[:OPERATION_BYTES]
            head = b"%d\n%f\n%d\n%b\n" % (doing.step, doing.since_s, doing.waits, operation)
            self._page[:] = head.ljust(RECORD_BYTES, b"\0")


class _Operation:
    """The context manager of one operation. As a generator it would cost more time than writing the record."""

    __slots__ = ("_activity", "_before", "_operation", "_span", "_waits")

    def __init__(self, activity: Activity, operation: str, waits: bool) -> None:
        self._activity = activity
        self._operation = operation
        self._waits = waits

    def __enter__(self) -> None:
        activity = self._activity
        self._before = activity.now
        activity.write(ActivityRecord(self._before.step, self._operation, self._waits, time.monotonic()))
        self._span = None if activity.annotate is None else activity.annotate(self._operation)
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        if kind is None:
            self._activity.write(self._before)


ACTIVITY = Activity()
"""The activity of this process. A worker trains in one thread, and every function that it calls records its operations
here."""


def shared_record() -> int:
    """Make shared memory for a record and return its descriptor, for the writing process to inherit."""
    descriptor = os.memfd_create("hpctrain-activity")
    os.ftruncate(descriptor, RECORD_BYTES)
    return descriptor


def read_record(descriptor: int) -> ActivityRecord | None:
    """Return the other process's activity; None when it has not written any yet."""
    content = os.pread(descriptor, RECORD_BYTES, 0)
    for _ in range(_READS):
        # The record may change while it is read: read until two reads agree.
        again = os.pread(descriptor, RECORD_BYTES, 0)
        if again == content:
            break
        content = again
    try:
        step, since, waits, operation, _ = content.split(b"\n", 4)
        return ActivityRecord(int(step), operation.decode(errors="replace"), bool(int(waits)), float(since))
    except ValueError:
        return None
