"""Starting and resuming a run as local processes: everything between the command line and the node processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock
from hpctrain.base.errors import FileError, InputError
from hpctrain.base.process import Runner
from hpctrain.corpus.index import check_tokenizer, vocabulary_of
from hpctrain.corpus.tokens import Corpus, open_validation
from hpctrain.launch.checks import check_plan, check_topology, is_usable
from hpctrain.launch.folder import RunFolder, create_run_folder, lock_run_folder, render_run
from hpctrain.launch.local import local_nodes
from hpctrain.launch.supervise import LocalJob, start_local_job
from hpctrain.records.model_spec import ModelSpec
from hpctrain.records.plan import Plan
from hpctrain.records.run import Run, read_run
from hpctrain.records.topology import Topology


@dataclass(frozen=True)
class Prepared:
    """A run that is checked and could start."""

    run: Run
    """With the vocabulary of its data filled in."""
    spec: ModelSpec
    nodes: list[str]
    topology: Topology | None
    plan: Plan | None


def settle(run: Run) -> tuple[Run, ModelSpec]:
    """The run with its model written out, vocabulary included, as its data says.

    Raises:
        InputError: the data folder is missing, not prepared or too small; the model's vocabulary is smaller than the
            data's; data.tokenizer is not that of the data.
        FileError: a token shard was cut short.
    """
    run.require_runnable()
    spec = run.spec()
    vocabulary = vocabulary_of(run.data.train)
    if spec.vocab is None:
        spec = spec.model_copy(update={"vocab": vocabulary})
    elif spec.vocab < vocabulary:
        raise InputError(f"model.dims.vocab: found {spec.vocab}; the data has tokens up to {vocabulary}: leave it out")
    if run.data.tokenizer is not None:
        check_tokenizer(run.data.train, run.data.tokenizer)
    Corpus.open(run.data.train, "train", run.data.seq_len)
    open_validation(run.data.train, run.data.valid, run.data.seq_len)
    return run.with_spec(spec), spec


def prepare(
    run_file: Path, overrides: tuple[str, ...], count: int | None, topology_file: Path | None, plan_file: Path | None
) -> Prepared:
    """Read and check everything a person gave; nothing is written.

    Args:
        count: number of virtual nodes; default: the run file's cluster.nodes.

    Raises:
        FileError, InputError: a file is wrong or missing.
        Refused: topology or plan are of other nodes.
    """
    run, spec = settle(read_run(run_file, overrides))
    nodes = local_nodes(count or int(run.cluster.nodes.partition("-")[0]))
    topology = Topology.read(topology_file) if topology_file else None
    if topology is not None:
        check_topology(topology, nodes, str(topology_file))
    plan = Plan.read(plan_file) if plan_file else None
    if plan is not None:
        check_plan(plan, run, spec, nodes, str(plan_file))
    return Prepared(run, spec, nodes, topology, plan)


def runs_folder() -> Path:
    """Where new run folders go: $HPCTRAIN_RUNS, else ./runs."""
    return Path(os.environ.get("HPCTRAIN_RUNS") or "runs")


def start(prepared: Prepared, base: Path, runner: Runner, clock: Clock) -> LocalJob:
    """Make a run folder and start the node processes.

    Raises:
        StorageError: the run folder cannot be written.
    """
    folder = create_run_folder(base, prepared.run, prepared.topology, prepared.plan, clock.wall())
    return _launch(folder, len(prepared.nodes), runner, clock)


def resume(path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, clock: Clock) -> LocalJob:
    """Go on with a run in its own folder, from its newest checkpoint, on `count` nodes (default: as before).

    Raises:
        InputError: the folder is in use, or holds no run.
        FileError: its run file is wrong.
    """
    folder = RunFolder(path.resolve())
    if not (folder.path / "run.yaml").is_file():
        raise InputError(f"{path}: no run.yaml in it; give a run folder, as `hpctrain status` lists them")
    run, _ = settle(read_run(folder.path / "run.yaml", overrides))
    attempts = folder.attempts()
    count = count or (len(attempts[-1]["nodes"]) if attempts else 1)
    lock = lock_run_folder(folder.path)
    try:
        if overrides:
            _rewrite(folder, run)
        _drop_stale_topology(folder, local_nodes(count), clock.wall())
        return start_local_job(folder, count, lock, runner, clock)
    finally:
        lock.release()


def _launch(folder: RunFolder, count: int, runner: Runner, clock: Clock) -> LocalJob:
    lock = lock_run_folder(folder.path)
    try:
        return start_local_job(folder, count, lock, runner, clock)
    finally:
        # The node processes hold it now: it is free when the last of them is gone, also when this process dies.
        lock.release()


def _rewrite(folder: RunFolder, run: Run) -> None:
    write_text(folder.path / "run.yaml", render_run(run))


def _drop_stale_topology(folder: RunFolder, nodes: list[str], now: float) -> None:
    """Put a topology aside that is too old or not of these nodes; the attempt then probes."""
    path = folder.path / "topology.json"
    try:
        if path.exists() and is_usable(Topology.read(path), nodes, now):
            return
    except FileError:
        pass  # unreadable: measured again as well
    if path.exists():
        path.rename(path.with_name("topology-before.json"))
