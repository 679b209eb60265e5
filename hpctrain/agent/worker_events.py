"""Makes the run's events from the reports and ends of workers. Pure."""

from __future__ import annotations

from typing import Any

from hpctrain.agent.group import WorkerUpdate
from hpctrain.agent.worker_messages import CheckpointSaved, NoDiskSpace, ResidualsDropped
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_RESUMABLE
from hpctrain.records.history.event import EventKind

EXPECTED_EXIT_CODES = (0, EXIT_RESUMABLE, EXIT_INFRASTRUCTURE)
"""Exit codes of workers that are done, stopped on request, or lost their peers."""

EventFields = tuple[EventKind, str, dict[str, Any]]
"""Kind, reason and data of an event."""


def event_of(node: str, update: WorkerUpdate) -> EventFields | None:
    """Return the event for a worker's report or end; None where it causes none by itself.

    Args:
        node: where the worker ran.
    """
    match update.report:
        case CheckpointSaved(error=None) as saved:
            data = {"step": saved.step, "seconds": saved.seconds, "size_bytes": saved.size_bytes}
            return "checkpoint_saved", f"step {saved.step} is on disk", data
        case CheckpointSaved() as failed:
            return "checkpoint_skipped", f"step {failed.step} not saved: {failed.error}", {"step": failed.step}
        case NoDiskSpace() as full:
            return "waiting_for_room", full.reason, {"step": full.step}
        case ResidualsDropped() as dropped if update.rank == 0:
            return "residuals_dropped", dropped.reason, {}
    if update.exit_code is not None and update.exit_code not in EXPECTED_EXIT_CODES:
        return "worker_died", *update.death(node)
    return None
