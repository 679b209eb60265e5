"""What an agent writes to events.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import append_line
from hpctrain.base.clock import Clock
from hpctrain.base.errors import StorageError
from hpctrain.records.event import Event, EventKind


class Journal:
    """Appends events of one node in one attempt."""

    def __init__(self, path: Path, node: str, attempt: int, clock: Clock) -> None:
        self._path = path
        self._node = node
        self._attempt = attempt
        self._clock = clock

    def write(self, kind: EventKind, generation: int, reason: str, **data: Any) -> None:
        """Append one event. A full disk does not stop the training: the event goes to stderr alone."""
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
        try:
            append_line(self._path, line)
        except StorageError as error:
            print(f"event not written: {error}", flush=True)
