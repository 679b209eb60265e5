"""Whether a run's checkpoints will fit where its folder goes: said before it starts, as it would find out in hours."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.room import free_bytes
from hpctrain.base.units import format_bytes
from hpctrain.records.imported_spec import Spec
from hpctrain.records.run import Run

STATE_BYTES = 12
"""Of each parameter in a checkpoint: the weight and AdamW's two moments, each in 4 bytes."""


def space_words(run: Run, spec: Spec, runs: Path) -> list[str]:
    """What a person should know about the room for checkpoints, as lines. While one is written, all that are kept
    are still there: room is needed for one more.

    Args:
        runs: the folder that run folders go to; it may not be there yet.
    """
    one, most = STATE_BYTES * spec.parameters(), run.checkpoint.keep + 1
    try:
        free = free_bytes(runs.resolve())
    except OSError as error:
        return [f"not checked before submitting: the room in {runs.resolve()} ({error.strerror})"]
    if free >= most * one:
        return []
    return [
        f"{runs.resolve()}: {format_bytes(free)} are free; {most} checkpoints of {format_bytes(one)} will need more, "
        "and one that does not fit is skipped: free some space, lower checkpoint.keep, or set HPCTRAIN_RUNS"
    ]
