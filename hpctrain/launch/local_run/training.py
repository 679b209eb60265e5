"""Start and resume a run as local processes: from the command line's values to the node processes."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.process import Runner
from hpctrain.launch.container_command import check_container
from hpctrain.launch.local import local_nodes
from hpctrain.launch.local_run.supervise import LocalJob, start_local_job
from hpctrain.launch.preflight.changed_settings import run_with_changes, write_changed_settings
from hpctrain.launch.preflight.checks import check_plan, drop_stale_topology
from hpctrain.launch.preflight.prepare import PreparedRun, fewest_nodes, make_folder, resolve_run
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.runs.code_copy import CODE_FOLDER
from hpctrain.runs.folder import (
    RunFolder,
    check_path,
    lock_run_folder,
    newest_plan,
)
from hpctrain.runs.locate import is_trusted_run
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text, restarting_from_seed
from hpctrain.runs.trust import check_trusted


def start(prepared: PreparedRun, base: Path, runner: Runner, clock: Clock) -> LocalJob:
    """Create a run folder and start the node processes.

    Raises:
        StorageError: the run folder cannot be written.
    """
    folder = make_folder(prepared, base, runner, clock)
    return _launch(folder, len(prepared.nodes), runner, clock)


def resume(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, clock: Clock, from_seed: bool = False
) -> LocalJob:
    """Continue a run in its run folder, from its newest checkpoint, on `count` nodes (None: as many as before).

    Args:
        from_seed: begin again with step 0 instead; existing checkpoints are renamed.

    Raises:
        InputError: the folder is in use, holds no run, or is not trusted; or the checkpoint allows no such change.
        FileError: its run file is wrong.
        StorageError: the run folder cannot be written; its settings are unchanged.
        RefusedError: every checkpoint that the run had saved is lost.
    """
    going = check_resumed(path, count, overrides, runner, from_seed)
    folder = RunFolder(going.path)
    lock = lock_run_folder(folder.path)
    try:
        if not from_seed and (lost := lost_checkpoints_text(folder.path)) is not None:
            raise RefusedError(lost)
        with write_changed_settings(folder, going.run):
            _check_edited_plan(folder.path, going.run, going.spec)
            drop_stale_topology(folder, local_nodes(going.count), clock.wall())
            with restarting_from_seed(folder, clock.wall()) if from_seed else contextlib.nullcontext():
                return start_local_job(folder, going.count, lock, runner, clock)
    finally:
        lock.release()


@dataclass(frozen=True)
class ResumedRun:
    """A run that passed all checks for continuing on this machine."""

    path: Path
    run: Run
    """The run with its new settings."""
    spec: Spec
    count: int
    """Number of virtual nodes."""


def check_resumed(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, from_seed: bool = False
) -> ResumedRun:
    """Check that a run can continue with these settings; nothing is written.

    Raises:
        InputError, FileError: as `resume`.
    """
    path = path.resolve()
    check_path(path)
    check_trusted(path)
    if not is_trusted_run(path):
        raise InputError(f"{path}: no run.yaml in it; give a run folder, as `hpctrain status` lists them")
    changed = run_with_changes(path, overrides, from_seed)
    _, spec = resolve_run(changed, runner, _code_copy(path))
    check_container(changed.container, True, shutil.which)
    if spec.sha256() != changed.spec().sha256():
        raise InputError(f"{path}: a run keeps its model (and its tokenizer); start a new run to train another one")
    attempts = RunFolder(path).attempts()
    return ResumedRun(path, changed, spec, count or (len(attempts[-1]["nodes"]) if attempts else fewest_nodes(changed)))


def _code_copy(path: Path) -> Path | None:
    """Return the copy of the user's code in a run folder; None if there is none."""
    return path / CODE_FOLDER if (path / CODE_FOLDER).is_dir() else None


def _check_edited_plan(path: Path, run: Run, spec: Spec) -> None:
    """Check the newest plan in the folder, which somebody may have edited, so that errors show now and not in the job.

    Raises:
        FileError, InputError: the plan cannot be run.
    """
    plan_file = newest_plan(path)
    if plan_file is not None:
        plan = Plan.read(plan_file, owned=True)
        # The plan is checked for its nodes; if the job gets other nodes, it makes a new plan.
        check_plan(plan, run, spec, plan.nodes, str(plan_file))


def _launch(folder: RunFolder, count: int, runner: Runner, clock: Clock) -> LocalJob:
    lock = lock_run_folder(folder.path)
    try:
        return start_local_job(folder, count, lock, runner, clock)
    finally:
        # The node processes hold the lock too: it becomes free when the last of them ends, even if this process dies.
        lock.release()
