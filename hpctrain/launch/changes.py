"""Changing the settings of a run that goes on: what its checkpoint allows, with the old settings kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import InputError
from hpctrain.base.owned import read_owned
from hpctrain.launch.folder import RunFolder, render_run
from hpctrain.launch.training import put_stale_plans_aside
from hpctrain.records.run import Run, run_of
from hpctrain.snapshot.published import listed

ALLOWED = (
    "steps", "cluster", "parallel", "optimizer", "compile", "checkpoint", "validation", "recovery", "profile",
)  # fmt: skip
"""Keys of run.yaml that a run may go on with in another form."""

_KEPT = {
    "cluster.kind": "a run in a queue stays one; `hpctrain train --resume` goes on with it here",
    "optimizer.name": "the checkpoint holds this optimizer's state",
    "name": "it names the run folder",
    "seed": "it decides the weights and the order of samples that the run began with",
    "code": "the copy in the run folder is what runs",
    "model": "the checkpoint holds this model's weights",
    "data": "the checkpoint says how far this data was read",
    "objective": "the checkpoint's model has learned this so far",
    "batch": "the checkpoint counts samples in batches of this size",
    "precision": "the checkpoint holds what this precision needs, the loss scale for one",
}
"""Key -> why it stays as it is; other keys that are not allowed have no reason but that nobody needs them changed."""


def changed_run(folder: Path, overrides: tuple[str, ...]) -> Run:
    """The run with other settings; nothing is written.

    Raises:
        FileError: an override is wrong.
        InputError: it changes what the run has to keep, or asks for fewer steps than are done.
    """
    before, after = run_of(folder), run_of(folder, overrides)
    refused = [text for key in _changed(before.to_json(), after.to_json()) if (text := _refusal(key)) is not None]
    if refused:
        raise InputError("\n".join([*refused, f"--set: allowed are the keys {', '.join(ALLOWED)}"]))
    done = _steps_saved(folder)
    if after.steps != before.steps and after.steps <= done:
        raise InputError(f"--set steps={after.steps}: the newest checkpoint is of step {done}; ask for more steps")
    return after


@contextlib.contextmanager
def settings_written(folder: RunFolder, run: Run) -> Iterator[None]:
    """Make `run` the settings in the run folder; the old ones stay beside them as run-<n>.yaml, and the plans that were
    made for them are put aside. When the block fails, all is as it was.

    Raises:
        StorageError: the folder cannot be written.
    """
    path = folder.path / "run.yaml"
    before, text = run_of(folder.path), read_owned(path).decode("utf-8")
    if run == before:
        yield
        return
    kept = _free_name(folder.path)
    write_text(kept, text)
    moved: list[tuple[Path, Path]] = []
    try:
        write_text(path, render_run(run))
        with storage_errors(folder.path):
            moved += put_stale_plans_aside(folder, before, run)
        yield
    except BaseException:
        for plan, aside in moved:
            aside.rename(plan)
        write_text(path, text)
        kept.unlink()
        raise


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The key paths whose values differ, as deep as both sides are mappings."""
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"


def _refusal(key: str) -> str | None:
    """Why a key keeps its value; None when it may change."""
    first = key.partition(".")[0]
    reason = _KEPT.get(key) or _KEPT.get(first)
    if reason is None and first in ALLOWED:
        return None
    return f"--set {key}: a run that goes on keeps it{f': {reason}' if reason else ''}; start a new run to change it"


def _steps_saved(folder: Path) -> int:
    found = listed(folder / "checkpoints")
    return int(found[-1].name.rpartition("-")[2]) if found else 0


def _free_name(folder: Path) -> Path:
    numbers = (int(path.stem[4:]) for path in folder.glob("run-*.yaml") if path.stem[4:].isdigit())
    return folder / f"run-{max(numbers, default=0) + 1}.yaml"
