"""attempts.jsonl, the ledger of a run: one line an attempt, and what the lines add up to. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

ATTEMPTS_FILE = "attempts.jsonl"

ExitClass = Literal["done", "resumable", "infrastructure", "fatal", "no_progress"]
"""done: the run is finished. resumable: it was asked to leave (preemption, time limit, a person). infrastructure: nodes
or the network failed. fatal: the training itself failed. no_progress: it ended without a new checkpoint, again."""
COUNTED_AGAINST_RETRIES = ("fatal", "no_progress")
"""Classes that spend recovery.retries; for the others nobody can blame the run."""


def last_end_text(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """How the newest attempt that has ended did so: 'attempt 0 ended (infrastructure): …'; None before the first end.

    An attempt of a run that is finished needs no words.
    """
    ended = next((line for line in reversed(lines) if line.get("reason") and "end" in line), None)
    if ended is None or ended.get("class") == "done":
        return None
    return f"attempt {ended.get('attempt', 0)} ended ({ended.get('class', 'unknown')}): {ended['reason']}"


def attempts_without_checkpoint(lines: Sequence[dict[str, Any]]) -> int:
    """Attempts in a row at the end of the ledger that left no new checkpoint, those apart that made room."""
    count = 0
    for line in reversed(lines):
        if _saved_checkpoint(line):
            break
        count += line.get("class") != "resumable"
    return count


def failures_since_checkpoint(lines: Sequence[dict[str, Any]], bad: Collection[str] = ()) -> int:
    """Failures of the run since its last new checkpoint: what of recovery.retries is used up.

    An attempt that left a checkpoint and then failed counts as the first one after it. One that failed on nodes alone
    which a later probe confirmed to be bad does not count.

    Args:
        bad: nodes that the probe of the attempt after these lines confirmed to be bad.
    """
    count, confirmed = 0, set(bad)
    for line in reversed(lines):
        confirmed |= set(line.get("confirmed", ()))
        count += line.get("class") in COUNTED_AGAINST_RETRIES and not _caused_by_bad_nodes(line, confirmed)
        if _saved_checkpoint(line):
            break
    return count


def _caused_by_bad_nodes(line: dict[str, Any], bad: Collection[str]) -> bool:
    faults = set(line.get("faults", ()))
    return bool(faults) and faults <= set(bad)


def _saved_checkpoint(line: dict[str, Any]) -> bool:
    return line.get("checkpoint_after") is not None and line["checkpoint_after"] != line.get("checkpoint_before")
