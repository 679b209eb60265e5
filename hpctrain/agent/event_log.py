"""Writes an agent's events to events.jsonl, among them those of a generation that begins, and describes the crash of
an agent in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TextIO

from hpctrain.agent.view import PeerView
from hpctrain.base.atomic import append_line
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.base.helper_thread import HelperThread
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.records.plan.plan import Plan

WAITING_EVENTS = 1000
"""Most events that wait while the disk is full; of more, the oldest are dropped."""
FLUSH_S = 5.0
"""Longest time, in seconds, for which the end of `EventLog.in_background` waits for events to be written."""


class EventLog:
    """Appends the events of one node in one attempt to events.jsonl."""

    def __init__(self, path: Path, node: str, attempt: int, clock: Clock) -> None:
        self._path = path
        self._node = node
        self._attempt = attempt
        self._clock = clock
        # The thread that makes a generation writes events too.
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque(maxlen=WAITING_EVENTS)
        self._thread: HelperThread | None = None
        self.generation = -1
        """The generation that the agent has entered last; -1 before the first one. Code that does not know the
        generation takes its number from here for its events."""

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Let a thread write the events of the `with` block, and what this process prints to stdout in the block, in
        their order, so that the block never waits for the file system. At the end of the block, wait at most `FLUSH_S`
        until all is written. If not all is written by then, the thread goes on as long as the process runs, and
        writes later events, too."""
        self._thread = thread = HelperThread("events")
        try:
            with contextlib.redirect_stdout(_BackgroundStream(sys.stdout, thread)):
                yield
        finally:
            if wait([thread.submit(lambda: None)], FLUSH_S).done:
                self._thread = None
                thread.shutdown()

    def write(self, kind: EventKind, generation: int, reason: str, **data: Any) -> None:
        """Append one event, and print it. If the file cannot be written, as when the disk is full, the event waits, and
        a later call that can write the file writes it first.

        Args:
            generation: number of the generation; -1 before the first one.
            reason: one sentence for the user.
            data: further keys of the event.
        """
        event = Event(
            time_s=self._clock.wall(),
            attempt=self._attempt,
            generation=generation,
            node=self._node,
            kind=kind,
            reason=reason,
            data=data,
        )
        line = json.dumps(event.to_json(), allow_nan=False)
        print(line, flush=True)
        if self._thread is None:
            self._append(line)
        else:
            self._thread.submit(self._append, line)

    def _append(self, line: str) -> None:
        with self._lock:
            self._waiting.append(line)
            try:
                while self._waiting:
                    append_line(self._path, self._waiting[0])
                    self._waiting.popleft()
            except StorageError as error:
                print(f"event not written: {error}", flush=True)


class _BackgroundStream(io.TextIOBase):
    """A text stream whose text a thread writes to another stream."""

    def __init__(self, stream: TextIO, thread: HelperThread) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        self._thread.submit(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._thread.submit(self._stream.flush)


def note_members(
    event_log: EventLog,
    record: Generation,
    last: Generation | None,
    nodes: Sequence[str],
    peers: Sequence[PeerView],
    left_out: Mapping[str, str],
) -> None:
    """Write an event for each node that has left or come back since the previous generation.

    Args:
        record: the next generation.
        last: the previous generation of the attempt. None: `record` is the first one, and only the nodes of `left_out`
            get an event.
        nodes: all nodes of the job.
        peers: the other agents, as this agent knows them.
        left_out: node that is no member of the next generation, although it may live -> the reason.
    """
    before = set(nodes) if last is None else {member.node for member in last.members}
    now = {member.node for member in record.members}
    crashed = {view.node: view.reason for view in peers if view.phase == "crashed"}
    for node in sorted(before - now):
        if node in left_out:
            event_log.write("node_left_out", record.number, left_out[node], node=node)
        elif last is not None:
            known = {"crashed": True} if node in crashed else {}
            reason = crashed.get(node, f"node {node} is gone")
            event_log.write("node_lost", last.number, reason, node=node, **known)
    for node in sorted(now - before):
        number = record.number - 1 if last is None else last.number
        event_log.write("node_returned", number, f"node {node} is back", node=node)


def note_start(event_log: EventLog, record: Generation, plan: Plan, last_step: int) -> None:
    """Write the event `generation_started`.

    Args:
        record: the generation.
        plan: its plan.
        last_step: the newest step that the workers of this node have reported; 0 if none.
    """
    data: dict[str, object] = {name: getattr(record, name) for name in ("plan", "restore", "first_weights")}
    members = [member.node for member in record.members]
    if (source := record.memory) is not None:
        data["memory"] = {"generation": source.generation, "step": source.step, "in_place": bool(source.continued)}
        data |= {"restore_step": source.step, "lost_steps": max(0, last_step - source.step)}
    event_log.write(
        "generation_started", record.number, record.reason, members=members, **data, pp=plan.pp, dp=plan.dp,
        tp=plan.tp,
    )  # fmt: skip


def crash_message(node: str, error: Exception) -> str:
    """Return a sentence that says which error ended the agent of a node. The whole traceback is in the agent's log."""
    if isinstance(error, HpctrainError):
        return f"the agent of {node} ended by an error: {error}"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"the agent of {node} crashed: {what}{at}"
