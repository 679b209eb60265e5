"""attempts.jsonl, the ledger of a run: one line per attempt, and counts over the lines. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

ATTEMPTS_FILE = "attempts.jsonl"

ExitClass = Literal["done", "resumable", "infrastructure", "fatal", "no_progress"]
"""done: the run is finished. resumable: the attempt was asked to stop (preemption, time limit, a user). infrastructure:
nodes or the network failed. fatal: the training itself failed. no_progress: the attempt ended without a new checkpoint,
and another one would do the same."""
COUNTED_AGAINST_RETRIES = ("fatal", "no_progress")
"""Exit classes that count against recovery.retries; the run is not to blame for the others."""


def is_new_checkpoint(before: str | None, newest: str | None) -> bool:
    """Whether `newest` names a newer checkpoint than `before`; a new checkpoint resets the count of failures."""
    return newest is not None and newest != before


def retries_spent_text(failures: int, retries: int) -> str | None:
    """Return why the run gives up after so many failures; None while retries remain.

    Args:
        failures: failures in a row without a new checkpoint, the last one included.
        retries: recovery.retries.
    """
    if failures <= retries:
        return None
    count = "1 failure" if failures == 1 else f"{failures} failures in a row"
    return f"{count} without a new checkpoint (recovery.retries is {retries})"


def last_end_text(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the last attempt ended: 'attempt 0 ended (infrastructure): …'; None before the first end.

    The result is also None for a run that is finished.
    """
    ended = next((line for line in reversed(lines) if line.get("reason") and "end" in line), None)
    if ended is None or ended.get("class") == "done":
        return None
    return f"attempt {ended.get('attempt', 0)} ended ({ended.get('class', 'unknown')}): {ended['reason']}"


def attempts_without_checkpoint(lines: Sequence[dict[str, Any]]) -> int:
    """Return the number of attempts since the last one that saved a checkpoint; those of class `resumable` do not
    count."""
    count = 0
    for line in reversed(lines):
        if _saved_checkpoint(line):
            break
        count += line.get("class") != "resumable"
    return count


def failures_since_checkpoint(lines: Sequence[dict[str, Any]], bad: Collection[str] = ()) -> int:
    """Return the failures of the run since its last new checkpoint, which count against recovery.retries.

    An attempt that saved a checkpoint and then failed counts as the first failure after it. An attempt that failed only
    on nodes that a later probe confirmed to be bad does not count.

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
    return is_new_checkpoint(line.get("checkpoint_before"), line.get("checkpoint_after"))
