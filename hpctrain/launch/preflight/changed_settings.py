"""Changes the settings of a run that continues: checks which of them its checkpoint allows to change, and keeps a copy
of the old settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.base.owned_files import read_owned
from hpctrain.checkpoint.published import listed, verify
from hpctrain.records.format.yaml_file import option_for
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import RunFolder, render_run

ALLOWED = (
    "steps", "cluster", "parallel", "optimizer", "compile", "checkpoint", "validation", "recovery", "adapt", "profile",
    "tracking", "energy",
)  # fmt: skip
"""Top-level keys of run.yaml that may change when a run continues, except for the keys in them that `_KEPT` names."""

_KEPT = {
    "cluster.kind": "a run in a queue stays one; `hpctrain train --resume` goes on with it here",
    "optimizer.steps_changed": "hpctrain writes it when the number of steps changes",
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
"""Reasons why a key cannot change, by key. A key that neither `ALLOWED` nor this table names cannot change either; the
message about such a key gives no reason.
"""


def run_with_changes(folder: Path, overrides: tuple[str, ...], from_seed: bool = False) -> Run:
    """Return the run in the run folder with changed settings, for any command that continues the run; nothing is
    written.

    If the number of steps changes, the warm-up of the learning rate stays as it was, and the learning rate continues
    from its value at the newest checkpoint.

    Args:
        overrides: changed settings, written key=value.
        from_seed: whether the run begins again, so that the settings need not fit a checkpoint.

    Raises:
        FileError: run.yaml or an override is wrong.
        InputError: an override changes a setting that must stay, or a number of steps to one that the newest checkpoint
            has reached already.
    """
    before, after = run_of(folder), run_of(folder, overrides)
    changed = [*_changed(before.to_json(), after.to_json())]
    refused = [text for key in changed if (text := _refusal(key, option_for(key, overrides))) is not None]
    if refused:
        raise InputError("\n".join([*refused, f"--set: allowed are the keys {', '.join(ALLOWED)}"]))
    done = 0 if from_seed else _steps_saved(folder)
    if after.steps != before.steps and after.steps <= done:
        raise InputError(f"--set steps={after.steps}: the newest checkpoint is of step {done}; ask for more steps")
    if after.steps == before.steps and not from_seed:
        return after
    optimizer = after.optimizer.with_steps_changed(done, before.steps)
    return after.model_copy(update={"optimizer": optimizer})


def changes_text(folder: Path, run: Run) -> list[str]:
    """Return lines that tell a person which settings of `run` differ from those in the run folder, under which name
    the old settings are kept, and which plans `write_changed_settings` renames; [] without differences.

    Raises:
        FileError, UntrustedError: run.yaml has errors; or it or the folder is untrusted.
    """
    before = run_of(folder)
    old, new = before.to_json(), run.to_json()
    keys = [key for key in _changed(old, new) if key != "optimizer.steps_changed"]
    words = [f"{key}: {_value(old, key)} -> {_value(new, key)}" for key in keys]
    if words:
        words.append(f"the settings of before are kept as {_backup_name(folder).name}")
    if _plan_inputs(run) != _plan_inputs(before):
        words += [f"{plan.name} is put aside; another plan is made" for plan in _plans(folder)]
    return words


@contextlib.contextmanager
def write_changed_settings(folder: RunFolder, run: Run) -> Iterator[None]:
    """Write `run` to the run folder's run.yaml; restore the old settings if the context ends with an error.

    The old settings stay in the folder as run-<n>.yaml. If plans depend on a changed setting, all plans in the folder
    are renamed, and get their names back after an error.

    Raises:
        StorageError: the folder cannot be written.
        FileError, UntrustedError: run.yaml has errors; or it or the folder is untrusted.
    """
    path = folder.path / "run.yaml"
    before, text = run_of(folder.path), read_owned(path).decode("utf-8")
    if run == before:
        yield
        return
    backup = _backup_name(folder.path)
    write_text(backup, text)
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
        backup.unlink()
        raise


def _plan_inputs(run: Run) -> list[object]:
    """Return the settings that a plan depends on; if one of them changes, a new plan is needed."""
    recovery, cluster = run.recovery, run.cluster
    return [
        run.batch, run.data.seq_len, run.objective, run.precision, run.compile, run.parallel, run.compression,
        recovery.spares, cluster.device, cluster.devices_per_node,
    ]  # fmt: skip


def put_stale_plans_aside(folder: RunFolder, before: Run, after: Run) -> list[tuple[Path, Path]]:
    """Rename the plans in a run folder if a setting that plans depend on differs between `before` and `after`; return
    the old and the new path of each renamed plan.

    Raises:
        FileError, UntrustedError: attempts.jsonl has errors; or it or the folder is untrusted.
        OSError: a plan cannot be renamed.
    """
    if _plan_inputs(after) == _plan_inputs(before):
        return []
    attempt = len(folder.attempts())
    plans = [(plan, folder.path / f"before-{attempt}-{plan.name}") for plan in _plans(folder.path)]
    for plan, aside in plans:
        plan.rename(aside)
    return plans


def _plans(folder: Path) -> list[Path]:
    return [*folder.glob("plan.json"), *folder.glob("plan-*.json")]


def _value(settings: Mapping[str, Any], key: str) -> object:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ between the two mappings; a key of a nested mapping is written
    'cluster.time'.

    Args:
        prefix: the key of both mappings themselves, with a trailing dot; '' at the top.
    """
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"


def _refusal(key: str, option: str) -> str | None:
    """Return why a key cannot change; None if it may change.

    Args:
        option: the option that changes it.
    """
    first = key.partition(".")[0]
    reason = _KEPT.get(key) or _KEPT.get(first)
    if reason is None and first in ALLOWED:
        return None
    asked = f"{option} {key}" if option == "--set" else option
    return f"{asked}: a run that goes on keeps it{f': {reason}' if reason else ''}; start a new run to change it"


def _steps_saved(folder: Path) -> int:
    """Return the step of the newest checkpoint whose files have their full size; 0 without such a checkpoint. Hashes
    are not checked here, because the checkpoint's loading checks them."""
    for path in reversed(listed(folder / "checkpoints")):
        with contextlib.suppress(CheckpointError):
            return verify(path, hashes=False).step
    return 0


def _backup_name(folder: Path) -> Path:
    numbers = (int(path.stem[4:]) for path in folder.glob("run-*.yaml") if path.stem[4:].isdigit())
    return folder / f"run-{max(numbers, default=0) + 1}.yaml"
