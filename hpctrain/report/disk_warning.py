"""Warn of a disk that is full or too small for the next checkpoint, from events and free bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base.units import format_bytes
from hpctrain.records.history.event import Event

_TRIES = ("checkpoint_saved", "checkpoint_skipped", "waiting_for_room")


def disk_warning(events: Sequence[Event], free_bytes: float | None) -> str | None:
    """Return a warning about checkpoints that could not or will not be written; None if there is no problem.

    Args:
        free_bytes: free bytes on the run folder's file system; None if unknown.
    """
    tries = [event for event in events if event.kind in _TRIES and "step" in event.data]
    saved = next((event for event in reversed(tries) if event.kind == "checkpoint_saved"), None)
    words = []
    if tries and tries[-1] is not saved:
        since = (
            f"the newest checkpoint is that of step {saved.data['step']}" if saved else "no checkpoint was saved yet"
        )
        words.append(f"{tries[-1].reason.rstrip('.')}; {since}")
    needed = saved.data.get("size_bytes") if saved is not None else None
    if needed and free_bytes is not None and free_bytes < needed:
        words.append(
            f"{format_bytes(free_bytes)} are free where the run folder lies, and the next checkpoint takes "
            f"{format_bytes(needed)}: free some space"
        )
    return "; ".join(words) or None
