"""Events of the run from the messages and ends of workers. Pure."""

from __future__ import annotations

from typing import Any

from hpctrain.agent.group import WorkerUpdate
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_RESUMABLE
from hpctrain.records.history.event import EventKind

EXPECTED_EXIT_CODES = (0, EXIT_RESUMABLE, EXIT_INFRASTRUCTURE)
"""Exit codes of workers that are done, stopped on request, or lost their peers."""

EventFields = tuple[EventKind, str, dict[str, Any]]
"""Kind, reason and data of an event."""


def event_of(node: str, news: WorkerUpdate) -> EventFields | None:
    """Return the event for a worker's message or end; None where it causes none by itself.

    Args:
        node: where the worker ran.
    """
    kind = news.message.get("type")
    if kind == "saved":
        return _saved(dict(news.message))
    if kind == "no_room":
        return "waiting_for_room", news.message["reason"], {"step": news.message["step"]}
    if kind == "residuals_dropped" and news.rank == 0:
        return "residuals_dropped", news.message["reason"], {}
    if news.exit_code is not None and news.exit_code not in EXPECTED_EXIT_CODES:
        reason, data = news.death(node)
        return "worker_died", reason, data
    return None


def _saved(message: dict[str, Any]) -> EventFields:
    step, error = message["step"], message.get("error")
    if error:
        return "checkpoint_skipped", f"step {step} not saved: {error}", {"step": step}
    data = {name: message[name] for name in ("step", "seconds", "size_bytes")}
    return "checkpoint_saved", f"step {step} is on disk", data
