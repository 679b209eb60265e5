"""Publishes the records on which the agents have agreed, as files, without waiting for the file system."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Protocol

from hpctrain.base.errors import FileError, StorageError
from hpctrain.base.helper_thread import Background
from hpctrain.records.history.generation import Generation

PATIENCE_S = 0.5
"""Longest time, in seconds, for which an agent that decided a record waits for its publication before it sends the
record to the other agents."""
OTHERS_AFTER_S = 1.0
"""Seconds after which an agent publishes a record that another agent has decided, unless that agent has done it."""
AGAIN_AFTER_S = 1.0
"""Seconds after which a publication that failed is tried again."""


class RecordStore(Protocol):
    """Where records are published (`GenerationStore`)."""

    def publish(self, record: Generation) -> None:
        """Publish a record, unless it is published; the errors are those of `GenerationStore.publish`."""


class Publication:
    """The publication of the records that an agent knows, one after the other: workers of an older generation write
    until the record of the next one is published, and the next attempt knows only published records."""

    def __init__(self, store: RecordStore, in_background: Background) -> None:
        self._store = store
        self._in_background = in_background
        self._waiting: deque[tuple[float, Generation]] = deque()
        self._call: Future[None] | None = None

    def begin(self, now: float, record: Generation, *, at_once: bool) -> None:
        """Publish a record after those that wait: at once, or `OTHERS_AFTER_S` later, because another agent is about to
        publish it.

        Args:
            now: seconds of the agent's clock.

        Raises:
            HpctrainError: as of `poll`.
        """
        self._waiting.append((now if at_once else now + OTHERS_AFTER_S, record))
        self.poll(now)

    @property
    def is_done(self) -> bool:
        """Whether every record that `begin` was given is published."""
        return not self._waiting

    def poll(self, now: float) -> None:
        """Go on publishing; to be called in each turn, at `now` seconds of the agent's clock.

        Raises:
            HpctrainError: another record with the same number is published, or the published one is
                untrusted. If a file has errors, or cannot be read or written, a later call tries again.
        """
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            _, record = self._waiting.popleft()
            try:
                call.result()
            except (StorageError, FileError) as error:
                print(f"hpctrain agent: generation {record.number} is not published yet: {error}", flush=True)
                self._waiting.appendleft((now + AGAIN_AFTER_S, record))
        if self._call is None and self._waiting and now >= self._waiting[0][0]:
            self._call = self._in_background(self._store.publish, self._waiting[0][1])
