"""Handles lost checkpoints: a run that saved checkpoints and can use none of them does not restart from the seed by
itself, but only when a person asks for it.

Days of training may be lost, and a run that silently counts from step 1 again would hide the loss. events.jsonl records
which steps were saved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.runs.folder import RunFolder

CHECKPOINTS = "checkpoints"
"""Folder in a run folder with the run's checkpoints."""


def saved_step(events: Sequence[Event]) -> int | None:
    """Return the newest step of which a run has saved a checkpoint since it last began from the seed; None if it has
    saved none.

    Args:
        events: all events of the run, in order.
    """
    newest: int | None = None
    for event in events:
        if event.kind == "from_seed":
            newest = None
        elif event.kind == "checkpoint_saved":
            newest = max(newest or 0, int(event.data["step"]))
    return newest


def lost_checkpoints_text(folder: Path) -> str | None:
    """Return why the run in `folder` cannot go on, if it has saved a checkpoint since it last began from the seed, and
    none can be used now; else None.

    The sizes, owners and modes of a checkpoint's files are checked. Their hashes are not, because that would mean
    reading whole checkpoints.

    Raises:
        FileError, UntrustedError: events.jsonl is damaged, or is not trusted.
    """
    step = saved_step(read_events(folder / "events.jsonl"))
    if step is None:
        return None
    refused = []
    for path in reversed(published.listed(folder / CHECKPOINTS)):
        try:
            published.verify(path, hashes=False)
        except CheckpointError as error:
            refused.append(f"{path.name}: {error}")
        else:
            return None
    return lost_checkpoints_error(folder, step, refused)


def lost_checkpoints_error(folder: Path, step: int, refused: Sequence[str]) -> str:
    """Return the error message for lost checkpoints.

    Args:
        step: the newest step that was saved.
        refused: a text for each existing checkpoint: its name and what is wrong with it.
    """
    state = f"none of those in {CHECKPOINTS} can be used ({'; '.join(refused)})" if refused else "none is there now"
    if not refused and (aside := sorted(path.name for path in (folder / CHECKPOINTS).glob("skipped-step-*"))):
        state = f"only {', '.join(aside)} is there, which could not be used"
    return (
        f"all checkpoints are lost: step {step} was saved, and {state}. Bring one back into {folder / CHECKPOINTS}, or "
        f"begin again from the seed with `hpctrain resubmit {folder.name} --from-seed` (a local run with "
        f"`hpctrain train --resume {folder.name} --from-seed`)"
    )


@contextlib.contextmanager
def restarting_from_seed(run: RunFolder, now: float) -> Iterator[list[str]]:
    """Record as an event that the run begins again from the seed, rename its checkpoints and yield their new names. If
    the `with` block fails, remove the event and restore the old names.

    Args:
        now: seconds since 1970.

    Raises:
        StorageError: the event cannot be written, or a checkpoint cannot be renamed.
    """
    folder, attempt, moved = run.path, max(0, len(run.attempts()) - 1), []
    events = folder / "events.jsonl"
    size = events.stat().st_size if events.exists() else None
    try:
        for path in published.listed(folder / CHECKPOINTS):
            name = published.quarantine(path)
            if name is None:
                raise StorageError(f"{path}: cannot be renamed; move it away, then begin from the seed")
            moved.append((path, name))
        aside, reason = [name for _, name in moved], "the run begins again from the seed, as somebody asked"
        run.append_event("from_seed", reason, attempt, now, saved=saved_step(read_events(events)), aside=aside)
        yield aside
    except BaseException:
        for path, name in moved:
            path.with_name(name).rename(path)
        if size is not None:
            os.truncate(events, size)
        raise
