"""attempts.jsonl, the ledger of a run: one line an attempt, and what the lines add up to. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

ExitClass = Literal["done", "resumable", "infrastructure", "fatal", "no_progress"]
"""done: the run is finished. resumable: it was asked to leave (preemption, time limit, a person). infrastructure: nodes
or the network failed. fatal: the training itself failed. no_progress: it ended without a new checkpoint, again."""
SPENDING = ("fatal", "no_progress")
"""Classes that spend recovery.retries; for the others nobody can blame the run."""


def idle_attempts(lines: Sequence[dict[str, Any]]) -> int:
    """Attempts in a row at the end of the ledger that left no new checkpoint, those apart that made room."""
    count = 0
    for line in reversed(lines):
        if _progressed(line):
            break
        count += line.get("class") != "resumable"
    return count


def spent(lines: Sequence[dict[str, Any]], bad: Collection[str] = ()) -> int:
    """Failures of the run since its last new checkpoint: what of recovery.retries is used up.

    An attempt that left a checkpoint and then failed counts as the first one after it. One that failed on nodes alone
    which a later probe confirmed to be bad does not count.

    Args:
        bad: nodes that the probe of the attempt after these lines confirmed to be bad.
    """
    count, confirmed = 0, set(bad)
    for line in reversed(lines):
        confirmed |= set(line.get("confirmed", ()))
        count += line.get("class") in SPENDING and not _excused(line, confirmed)
        if _progressed(line):
            break
    return count


def _excused(line: dict[str, Any], bad: Collection[str]) -> bool:
    faults = set(line.get("faults", ()))
    return bool(faults) and faults <= set(bad)


def _progressed(line: dict[str, Any]) -> bool:
    return line.get("checkpoint_after") is not None and line["checkpoint_after"] != line.get("checkpoint_before")
