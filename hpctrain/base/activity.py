"""What a process is doing at the moment, in a record that another process can read even while the first one hangs.

A worker keeps its record in memory that it shares with its agent. The agent reads it without an answer from the worker,
so it also works while the worker is stopped, or stuck inside a library that holds the GIL.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

RECORD_BYTES = 256
OPERATION_BYTES = 160
_READS = 8


WaitsFor = Literal["pp", "dp", "world", "device"]
"""For whom an operation waits: for other stages (pp), for other replicas or shards (dp), for all ranks (world), or for
this rank's GPU (device)."""


class ActivityRecord(NamedTuple):
    """The current activity of a process."""

    step: int = 0
    """Number of the optimizer step under way, from 1; 0 before the first."""
    operation: str = "start"
    """Name of the operation, as torch's profile shows it: 'recv output of stage 0 mb 3 from rank 0' (mb is
    micro-batch)."""
    waits: bool = False
    """Whether the operation ends only when another process, or the GPU, does its part."""
    since_s: float = 0.0
    """When the operation began: seconds on this machine's monotonic clock."""

    def words(self) -> str:
        """Return the operation for a person: with 'micro-batch' where a torch profiler trace has 'mb'."""
        return self.operation.replace(" mb ", " micro-batch ")


class ActivitySpan(NamedTuple):
    """An operation that has ended."""

    operation: str
    """Name of the operation, as in `ActivityRecord`."""
    start_s: float
    """Seconds on this machine's monotonic clock."""
    end_s: float
    kind: WaitsFor | Literal["compute", "hidden"]
    """For whom it waited; compute: for nobody. hidden: a message that was under way while this process computed."""


class Activity:
    """The current ActivityRecord of this process. Only the thread that trains changes it, in about a microsecond."""

    def __init__(self) -> None:
        self.now = ActivityRecord()
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        """Function that opens a span of the given name in torch's profile; None while no profiler runs."""
        self._spans: list[ActivitySpan] | None = None
        self._spans_max = 0
        self._page: mmap.mmap | None = None
        self._waited: dict[WaitsFor, float] = {}
        self.waited_s = 0.0
        """Seconds of all waits that have ended so far."""
        self._waiting_since = 0.0
        self._hidden: list[tuple[float, float]] = []

    def share(self, descriptor: int) -> None:
        """Write the current and all later activity records of this process also to the shared memory `descriptor`,
        which `shared_record` made."""
        self._page = mmap.mmap(descriptor, RECORD_BYTES)
        self.write(self.now)

    def begin_step(self, step: int) -> None:
        """Record that optimizer step number `step` has begun."""
        self.write(ActivityRecord(step, f"step {step}", False, time.monotonic()))

    def doing(self, operation: str, waits: WaitsFor | None = None) -> _Operation:
        """Return a context manager that records `operation` during its block, and then restores the previous record.
        While a profiler runs, the block is also a span of the profile. If the block raises an error, the record stays
        and shows what failed.

        Args:
            waits: for whom the operation waits: it ends only when another process, or the GPU, does its part.
        """
        return _Operation(self, operation, waits)

    @contextmanager
    def recorded(self, most: int) -> Iterator[list[ActivitySpan]]:
        """Yield a list that gets each operation that ends during the `with` block, inner ones before outer ones.

        Args:
            most: most operations that are recorded.
        """
        spans: list[ActivitySpan] = []
        self._spans, self._spans_max = spans, most
        try:
            yield spans
        finally:
            self._spans = None

    @property
    def is_recording(self) -> bool:
        """Whether operations are recorded."""
        return self._spans is not None

    def add_span(self, span: ActivitySpan) -> None:
        """Record an operation that has ended, if operations are recorded."""
        if self._spans is not None and len(self._spans) < self._spans_max:
            self._spans.append(span)

    def take_waits(self) -> dict[WaitsFor, float]:
        """Return for whom this process waited since the last call, in seconds of the host's time, and begin anew. Of an
        operation within another one, the time counts for the inner one alone."""
        waited, self._waited = self._waited, {}
        return waited

    def add_hidden(self, start_s: float, end_s: float, waited_s: float = 0.0) -> None:
        """Count a message that was under way while this process computed. Call it while this process waits for the
        message; what lies after the beginning of this wait does not count.

        Args:
            start_s: when the message was sent, in seconds on this machine's monotonic clock.
            end_s: when it was complete.
            waited_s: seconds between `start_s` and `end_s` in which this process waited for something else. They are
                taken off as if they were the first ones.
        """
        until_s = min(end_s, self._waiting_since)
        self._hidden.append((start_s + waited_s, until_s))
        if until_s > start_s:
            self.add_span(ActivitySpan("messages under way", start_s, until_s, "hidden"))

    def take_hidden_s(self) -> float:
        """Return for how many seconds since the last call at least one message was under way while this process
        computed, as `add_hidden` counted, and begin anew."""
        total = reached = 0.0
        for start, end in sorted(self._hidden):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        self._hidden.clear()
        return total

    def add_wait(self, waits: WaitsFor, seconds: float, before_s: float) -> None:
        """Count an operation that waited.

        Args:
            seconds: time of the operation.
            before_s: value of `waited_s` when the operation began.
        """
        inner = self.waited_s - before_s
        self._waited[waits] = self._waited.get(waits, 0.0) + seconds - inner
        self.waited_s = before_s + seconds

    def write(self, doing: ActivityRecord) -> None:
        """Replace the current activity record by `doing`, also in the shared memory."""
        self.now = doing
        if self._page is not None:
            operation = doing.operation.replace("\n", " ").encode()[:OPERATION_BYTES]
            head = b"%d\n%f\n%d\n%b\n" % (doing.step, doing.since_s, doing.waits, operation)
            self._page[:] = head.ljust(RECORD_BYTES, b"\0")


class _Operation:
    """The context manager that `Activity.doing` returns. It is a class, because a generator
    (`contextlib.contextmanager`) would cost more time than writing the activity record."""

    __slots__ = ("_activity", "_before", "_inner_s", "_operation", "_span", "_start_s", "_waits")

    def __init__(self, activity: Activity, operation: str, waits: WaitsFor | None) -> None:
        self._activity = activity
        self._operation = operation
        self._waits = waits

    def __enter__(self) -> None:
        activity = self._activity
        self._before = activity.now
        self._start_s, self._inner_s = time.monotonic(), activity.waited_s
        if self._waits is not None and not self._before.waits:
            activity._waiting_since = self._start_s
        activity.write(ActivityRecord(self._before.step, self._operation, self._waits is not None, self._start_s))
        self._span = None if activity.annotate is None else activity.annotate(self._operation)
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        if kind is None:
            now = time.monotonic()
            if self._waits is not None:
                self._activity.add_wait(self._waits, now - self._start_s, self._inner_s)
            if self._activity.is_recording:
                self._activity.add_span(ActivitySpan(self._operation, self._start_s, now, self._waits or "compute"))
            self._activity.write(self._before)


ACTIVITY = Activity()
"""The activity of this process. A worker trains in one thread, and every function that it calls records its operations
in this object."""


def shared_record() -> int:
    """Make shared memory for an ActivityRecord, and return its file descriptor. The process that writes the record
    inherits the descriptor."""
    descriptor = os.memfd_create("hpctrain-activity")
    os.ftruncate(descriptor, RECORD_BYTES)
    return descriptor


def read_record(descriptor: int) -> ActivityRecord | None:
    """Return the activity that a process wrote to the shared memory `descriptor`; None if it has not written any
    yet."""
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
