"""Starting and resuming a run as local processes: from the command line's values to the node processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.base.process import Runner
from hpctrain.corpus.read.index import check_tokenizer
from hpctrain.corpus.read.mixture import open_training
from hpctrain.corpus.read.tokens import open_named, open_validation
from hpctrain.launch.changed_settings import run_with_changes, write_changed_settings
from hpctrain.launch.checks import check_devices, check_plan, check_topology, is_usable
from hpctrain.launch.container_command import check_container
from hpctrain.launch.local import local_nodes
from hpctrain.launch.model_sizes import special_tokens_for, with_model_sizes
from hpctrain.launch.staleness import faults_since, staleness
from hpctrain.launch.supervise import LocalJob, start_local_job
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.objective import lengths
from hpctrain.records.run.run import Run, read_run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.code_copy import CODE_FOLDER, copy_code
from hpctrain.runs.folder import (
    RunFolder,
    check_path,
    create_run_folder,
    lock_run_folder,
    newest_plan,
    remove_on_error,
)
from hpctrain.runs.locate import is_trusted_run
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text, restarting_from_seed
from hpctrain.runs.secrets import check_secrets
from hpctrain.runs.trust import check_trusted


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and could start."""

    run: Run
    """The run, with the vocabulary of its data."""
    spec: Spec
    nodes: list[str]
    """Names of the nodes; empty if they are not known yet, as for a job that is to be queued."""
    topology: Topology | None
    plan: Plan | None


def resolve_run(run: Run, runner: Runner, code: Path | None = None) -> tuple[Run, Spec]:
    """Return the run with its model written out, including the vocabulary of its data, and its spec.

    Args:
        code: folder with the person's packages; default: the run file's.

    Raises:
        InputError: the data folder is missing, not prepared or too small; the model's vocabulary is smaller than the
            data's; data.tokenizer is not that of the data; the person's own model cannot be used; the run file holds a
            secret, or names one that is missing.
        FileError: a token shard was cut short.
    """
    check_secrets(run, os.environ)
    run, spec = with_model_sizes(run, runner, code)
    objective, data = run.effective_objective(), run.data
    needed = special_tokens_for(run, objective)
    if spec.vocabulary < needed.vocabulary:
        own = f", the objective {objective.mode} its own" if needed.vocabulary > needed.data_vocabulary else ""
        field, remedy = "model.dims.vocab", f"leave it out, or make it {needed.vocabulary}"
        if run.model.hf is not None:
            field, remedy = "model.hf: config.json: vocab_size", "prepare the data with the model's own tokenizer"
        raise InputError(
            f"{field}: found {spec.vocabulary}; the data has tokens up to {needed.data_vocabulary}{own}: {remedy}"
        )
    if data.tokenizer is not None:
        check_tokenizer(data.train_folders, data.tokenizer)
    length = lengths(objective, data.seq_len).raw
    open_training(data.train_folders, data.weights, length)
    named = data.valid if isinstance(data.valid, dict) else {}
    open_validation(data.train_folders, [] if named else data.valid_folders, length)
    open_named(data.train_folders, named, length)
    return run, spec


def prepare(
    run_file: Path,
    overrides: tuple[str, ...],
    count: int | None,
    topology_file: Path | None,
    plan_file: Path | None,
    runner: Runner,
    queued: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> PreparedRun:
    """Read and check everything that a person gave; nothing is written.

    Args:
        count: number of virtual nodes; default: the run file's cluster.nodes.
        queued: the nodes are known only when the job starts; what depends on them is checked there.
        defaults: values for keys that neither the run file nor an override gives.

    Raises:
        FileError, InputError: a file is wrong or missing.
        RefusedError: topology or plan are for other nodes.
    """
    run, spec = resolve_run(read_run(run_file, overrides, defaults), runner)
    check_container(run.container, not queued, shutil.which)
    topology = Topology.read(topology_file) if topology_file else None
    plan = Plan.read(plan_file) if plan_file else None
    nodes = [] if queued else local_nodes(count or fewest_nodes(run))
    if topology is not None and not queued:
        check_topology(topology, nodes, str(topology_file))
    if plan is not None:
        check_plan(plan, run, spec, plan.nodes if queued else nodes, str(plan_file))
        if topology is not None:
            check_devices(plan, topology, str(plan_file))
    return PreparedRun(run, spec, nodes, topology, plan)


def fewest_nodes(run: Run) -> int:
    """Return the fewest nodes that a run needs: 3 of '3-4'."""
    return run.cluster.node_range[0]


def runs_folder() -> Path:
    """Return the folder for new run folders: $HPCTRAIN_RUNS, else ./runs."""
    return Path(os.environ.get("HPCTRAIN_RUNS") or "runs")


def start(prepared: PreparedRun, base: Path, runner: Runner, clock: Clock) -> LocalJob:
    """Create a run folder and start the node processes.

    Raises:
        StorageError: the run folder cannot be written.
    """
    folder = make_folder(prepared, base, runner, clock)
    return _launch(folder, len(prepared.nodes), runner, clock)


def make_folder(prepared: PreparedRun, base: Path, runner: Runner, clock: Clock) -> RunFolder:
    """Create the run folder with everything that the run needs: resolved files and a copy of the person's code.

    Raises:
        InputError: `code` is no folder, or too large to be code.
        StorageError: the run folder cannot be written; nothing of it is left.
    """
    folder = create_run_folder(base, prepared.run, prepared.topology, prepared.plan, clock.wall())
    if prepared.run.code is not None:
        with remove_on_error(folder):
            copy_code(Path(prepared.run.code), folder.path, runner)
    return folder


def resume(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, clock: Clock, from_seed: bool = False
) -> LocalJob:
    """Go on with a run in its own folder, from its newest checkpoint, on `count` nodes (default: as before).

    Args:
        from_seed: begin again instead; existing checkpoints are renamed.

    Raises:
        InputError: the folder is in use, holds no run, or is not trusted; or the checkpoint allows no such change.
        FileError: its run file is wrong.
        StorageError: the run folder cannot be written; its settings are unchanged.
        RefusedError: all that it had saved is lost.
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
    """A run that passed the checks and could go on here."""

    path: Path
    run: Run
    """The run with the settings that it goes on with."""
    spec: Spec
    count: int
    """Number of virtual nodes."""


def check_resumed(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, from_seed: bool = False
) -> ResumedRun:
    """Check that a run can go on with these settings; nothing is written.

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
    """Return the copy of the person's code in a run folder; None if there is none."""
    return path / CODE_FOLDER if (path / CODE_FOLDER).is_dir() else None


def _check_edited_plan(path: Path, run: Run, spec: Spec) -> None:
    """Check the plan in the folder, which a person may have edited: errors are reported now, not in the job.

    Raises:
        FileError, InputError: it cannot be run.
    """
    plan_file = newest_plan(path)
    if plan_file is not None:
        plan = Plan.read(plan_file, owned=True)
        # The plan's own nodes are used: a job with other nodes makes a new plan.
        check_plan(plan, run, spec, plan.nodes, str(plan_file))


def _launch(folder: RunFolder, count: int, runner: Runner, clock: Clock) -> LocalJob:
    lock = lock_run_folder(folder.path)
    try:
        return start_local_job(folder, count, lock, runner, clock)
    finally:
        # The node processes hold the lock now: it is free when the last of them has ended, even if this process dies.
        lock.release()


def drop_stale_topology(
    folder: RunFolder, nodes: list[str], now: float, drivers: Mapping[str, str] | None = None
) -> list[str]:
    """Rename a topology that is too old, is for other nodes, or is older than a fault on them, so that the attempt
    probes.

    Args:
        now: seconds since 1970.
        drivers: version of the GPU driver by node, where it is known.

    Returns:
        What speaks against the topology, as lines.
    """
    path = folder.path / "topology.json"
    if not path.exists():
        return []
    try:
        topology = Topology.read(path, owned=True)
        faults = faults_since(topology, folder.attempts(), now)
        words = [*staleness(topology, nodes, drivers or {}, now), *faults]
        if not faults and is_usable(topology, nodes, now):
            return words
    except FileError as error:
        words = str(error).splitlines()  # unreadable: measure again as well
    path.rename(path.with_name("topology-before.json"))
    return [*words, "the nodes are measured again; the topology found is now topology-before.json"]
