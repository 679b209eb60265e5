"""events.jsonl: what happened to the run, one line per event, in the order of writing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.records.format.document import Document
from hpctrain.records.format.input_file import read_jsonl

EventKind = Literal[
    "attempt_started",
    "probing",
    "probed",
    "data_staged",
    "data_not_staged",
    "planned",
    "generation_started",
    "worker_died",
    "worker_hung",
    "node_lost",
    "node_left_out",
    "node_returned",
    "agent_crashed",
    "fork_server_lost",
    "preempted",
    "time_limit",
    "checkpoint_saved",
    "checkpoint_skipped",
    "from_seed",
    "checkpoints_lost",
    "waiting_for_room",
    "residuals_dropped",
    "recovered",
    "replanned",
    "notify_failed",
    "finished",
    "failed",
]


class Event(Document):
    """A line of events.jsonl: one event of a run."""

    schema_kind: ClassVar[str] = "event"
    kind: EventKind

    time_s: float
    """Seconds since 1970."""
    attempt: int
    generation: int
    node: str
    """Node that wrote the event."""
    reason: str
    """What happened and why, in one sentence."""
    data: dict[str, Any] = {}


def read_events(path: Path, attempt: int | None = None) -> list[Event]:
    """Return the events in a file. A last line that a killed writer left incomplete is skipped.

    Args:
        attempt: return only the events of this attempt.
    """
    events = [Event.from_json(value, str(path)) for value in read_jsonl(path)]
    return events if attempt is None else [event for event in events if event.attempt == attempt]


def nodes_at_start(events: Sequence[Event]) -> list[str]:
    """Return the nodes that the attempt began with, from its attempt_started event; [] without one."""
    return next((list(event.data.get("nodes", [])) for event in events if event.kind == "attempt_started"), [])


def nodes_excluded_by_probe(events: Sequence[Event]) -> set[str]:
    """Return the nodes that the probe's verdict excludes."""
    return {str(node) for event in events if event.kind == "probed" for node in event.data.get("exclude", [])}
