"""Training on this machine as a function: `train` and `resume` return when the run is done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.api.arguments import (
    AnyPath,
    Progress,
    check_count,
    folder_of,
    overrides_of,
    path_of,
    report_warnings,
    reporter,
)
from hpctrain.api.loaded_run import LoadedRun
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_DONE, HpctrainError, InputError, RefusedError
from hpctrain.base.owned_files import owner_only
from hpctrain.base.process import SystemRunner
from hpctrain.hf.folder import dropout_warning
from hpctrain.launch import local_run
from hpctrain.launch.local import check_gpus
from hpctrain.launch.local_run import LocalJob
from hpctrain.launch.preflight.prepare import RunInputs, prepare, runs_folder
from hpctrain.launch.preflight.site import login_node_words
from hpctrain.launch.preflight.stale_topology import stale_topology_text
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.run.run import Run, run_of
from hpctrain.report.event_text import describe_event
from hpctrain.report.live_run import follow
from hpctrain.runs.code_copy import omitted_secrets_text
from hpctrain.runs.file_system import checkpoint_space_warning
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


def train(
    run_file: AnyPath, nodes: int | None = None, *, settings: Mapping[str, Any] | None = None,
    topology: AnyPath | None = None, plan: AnyPath | None = None, on_step: Callable[[MetricRow], None] | None = None,
    progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Train as processes of this machine until all steps are done, and return the run.

    An interrupt (Ctrl-C, or a notebook's stop button) saves a checkpoint, ends the processes and raises
    KeyboardInterrupt; a second one ends them at once. An exception of `on_step` stops the run in the same way.

    Args:
        nodes: number of virtual nodes; None: cluster.nodes of the run file.
        settings: values that replace those of the run file, by key: {"steps": 1000}.
        topology: topology file; None: the nodes are probed first.
        plan: plan file, obeyed to the letter; None: a plan is made.
        on_step: called with the metrics of each step.
        progress: called with a line for each event, such as a saved checkpoint or a recovery.

    Raises:
        FileError, InputError: a file or a setting is wrong; nothing was started, or the run ended at once.
        RefusedError: the model does not fit, or the topology or the plan is of other nodes.
        HpctrainError: the run ended before its last step; the message names the run folder.
    """
    check_count("train: nodes", nodes)
    runner, clock = SystemRunner(), SystemClock()
    given = RunInputs(Path(run_file), overrides_of(settings), path_of(topology), path_of(plan))
    with owner_only():
        prepared = prepare(given, runner, nodes)
        report_warnings(progress, stale_topology_text(prepared.topology, prepared.nodes, clock.wall()))
        _warn_of_machine(progress, prepared.run, len(prepared.nodes))
        job = local_run.start(prepared, runs_folder(), runner, clock)
        report_warnings(progress, checkpoint_space_warning(prepared.run, prepared.spec, runs_folder(), prepared.plan))
        report_warnings(progress, dropout_warning(prepared.run))
        report_warnings(progress, omitted_secrets_text(job.folder.path))
        return _finish(job, on_step, progress)


def resume(
    run: LoadedRun | AnyPath, nodes: int | None = None, *, settings: Mapping[str, Any] | None = None,
    on_step: Callable[[MetricRow], None] | None = None, progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Go on with a run from its newest checkpoint, as processes of this machine, until all steps are done.

    Args:
        run: the run, its folder or its name.
        nodes: number of virtual nodes; None: as many as in the last attempt.
        settings: changed settings by key, as far as the checkpoint allows; {"steps": 2000} gives more steps.
        on_step: called with the metrics of each step.
        progress: called with a line for each event.

    Raises:
        InputError: there is no such run, it is in use, or a setting may not change.
        RefusedError: every checkpoint that the run had saved is lost.
        HpctrainError: the run ended before its last step.
    """
    check_count("resume: nodes", nodes)
    folder = folder_of(run)
    with owner_only():
        job = local_run.resume(folder, nodes, overrides_of(settings), SystemRunner(), SystemClock())
        _warn_of_machine(progress, run_of(folder), len(job.processes))
        return _finish(job, on_step, progress)


def _finish(job: LocalJob, on_step: Callable[[MetricRow], None] | None, progress: Progress | None) -> LoadedRun:
    """Wait until the processes of a local run have ended, and return the run.

    Raises:
        HpctrainError: the run ended before its last step, with the class of its exit code.
        BaseException: what interrupted the wait, after the processes have ended.
    """
    folder, clock, say = job.folder.path, SystemClock(), reporter(progress)
    # After a resume, the run's files also hold earlier attempts.
    since_s = clock.wall() - 1.0
    say(f"run folder {folder}")
    report_warnings(progress, add_to_history("train", folder, None))
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        (job.kill if asked else job.stop)()
        asked = True

    with _on_sigterm(stop):
        try:
            for item in follow(folder, clock, until=lambda: not job.running(), since_s=since_s):
                if not isinstance(item, MetricRow):
                    say(describe_event(item))
                elif on_step is not None:
                    on_step(item)
        except BaseException:
            stop()
            try:
                job.wait(lambda: None)
            except BaseException:
                job.kill()
                job.wait(lambda: None)
            raise
        ended = job.wait(lambda: None)
    if ended.exit_code == EXIT_DONE:
        return LoadedRun(folder)
    kinds: Iterable[type[HpctrainError]] = (InputError, RefusedError)
    kind = next((kind for kind in kinds if kind.exit_code == ended.exit_code), HpctrainError)
    more = "resume goes on with it" if ended.stopped else f"the logs are in {folder}/logs/{job.attempt}"
    raise kind(f"{folder}: {ended.reason}; {more}")


@contextlib.contextmanager
def _on_sigterm(stop: Callable[..., None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, with which `cancel` and `hpctrain cancel` stop a run; only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn_of_machine(progress: Progress | None, run: Run, count: int) -> None:
    report_warnings(progress, check_gpus(count, run.cluster.device, os.environ))
    report_warnings(progress, login_node_words(count, Slurm(SystemRunner()), os.environ))
