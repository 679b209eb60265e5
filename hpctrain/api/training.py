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
from hpctrain.hf.folder import hf_warnings
from hpctrain.launch import local_run
from hpctrain.launch.local import check_gpus
from hpctrain.launch.local_run import LocalJob, LocalJobResult
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
        RefusedError: the model does not fit, the topology or the plan is of other nodes, or this is not the program's
            main thread.
        HpctrainError: the run ended before its last step; the message names the run folder.
        StorageError: the run folder cannot be written.
    """
    _check_thread("train")
    check_count("train: nodes", nodes)
    runner, clock = SystemRunner(), SystemClock()
    prepared = prepare(
        RunInputs(Path(run_file), overrides_of(settings), path_of(topology), path_of(plan)), runner, nodes
    )
    report_warnings(progress, stale_topology_text(prepared.topology, prepared.nodes, clock.wall()))
    report_warnings(progress, _machine_warnings(prepared.run, len(prepared.nodes)))

    def warnings(job: LocalJob) -> Iterator[str]:
        yield from checkpoint_space_warning(prepared.run, prepared.spec, runs_folder(), prepared.plan)
        yield from hf_warnings(prepared.run)
        yield from omitted_secrets_text(job.folder.path)

    return _supervise(lambda: local_run.start(prepared, runs_folder(), runner, clock), warnings, on_step, progress)


def resume(
    run: LoadedRun | AnyPath, nodes: int | None = None, *, settings: Mapping[str, Any] | None = None,
    on_step: Callable[[MetricRow], None] | None = None, progress: Progress | None = None,
) -> LoadedRun:  # fmt: skip
    """Go on with a run from its newest checkpoint, as processes of this machine, until all steps are done. An interrupt
    and an exception of `on_step` act as in `train`.

    Args:
        run: the run, its folder or its name.
        nodes: number of virtual nodes; None: as many as in the last attempt.
        settings: changed settings by key, as far as the checkpoint allows; {"steps": 2000} gives more steps.
        on_step: called with the metrics of each step.
        progress: called with a line for each event.

    Raises:
        InputError: there is no such run, it is in use, or a setting may not change.
        RefusedError: every checkpoint that the run had saved is lost, or this is not the program's main thread.
        HpctrainError: the run ended before its last step.
        StorageError: the run folder cannot be written.
    """
    _check_thread("resume")
    check_count("resume: nodes", nodes)
    folder, overrides = folder_of(run), overrides_of(settings)

    def warnings(job: LocalJob) -> Iterator[str]:
        yield from _machine_warnings(run_of(folder), len(job.processes))

    def start() -> LocalJob:
        return local_run.resume(folder, nodes, overrides, SystemRunner(), SystemClock())

    return _supervise(start, warnings, on_step, progress)


def _check_thread(name: str) -> None:
    """Check that this is the program's main thread, the only one that can take the SIGTERM with which `cancel` stops
    a run; elsewhere the signal would end the program, and nothing would be saved.

    Raises:
        RefusedError: it is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RefusedError(
            f"{name}: found a thread that is not the program's main thread, in which `cancel` could not stop the run; "
            "call it in the main thread, or start a new run with submit(run_file, here=True) and wait for it with wait"
        )


def _supervise(
    start: Callable[[], LocalJob], warnings: Callable[[LocalJob], Iterable[str]],
    on_step: Callable[[MetricRow], None] | None, progress: Progress | None,
) -> LoadedRun:  # fmt: skip
    """Start the processes of a local run, wait until they have ended, and return the run. Whatever fails after the
    start stops them.

    Args:
        warnings: returns the warnings about the started run.

    Raises:
        HpctrainError: the run ended before its last step; the subclass raised belongs to the run's exit code.
        BaseException: what interrupted the wait, after the processes have ended.
    """
    clock, say = SystemClock(), reporter(progress)
    # After a resume, the run's files also hold earlier attempts.
    since_s = clock.wall()
    job: LocalJob | None = None
    is_early, asked = False, False

    def stop(*_: object) -> None:
        nonlocal is_early, asked
        if job is None:
            is_early = True
            return
        (job.kill if asked else job.stop)()
        asked = True

    with _on_sigterm(stop):
        try:
            with owner_only():
                job = start()
            if is_early:
                stop()
            folder = job.folder.path
            say(f"run folder {folder}")
            with owner_only():
                unrecorded = add_to_history("train", folder, None)
            report_warnings(progress, [*unrecorded, *warnings(job)])
            for item in follow(folder, clock, until=lambda: not job.running(), since_s=since_s):
                if not isinstance(item, MetricRow):
                    say(describe_event(item))
                elif on_step is not None:
                    on_step(item)
        except BaseException:
            if job is None:
                raise
            stop()
            try:
                _wait(job, clock)
            except BaseException:
                job.kill()
                _wait(job, clock)
            raise
        ended = _wait(job, clock)
    if ended.exit_code == EXIT_DONE:
        return LoadedRun(folder)
    kinds: Iterable[type[HpctrainError]] = (InputError, RefusedError)
    kind = next((kind for kind in kinds if kind.exit_code == ended.exit_code), HpctrainError)
    more = "resume goes on with it" if ended.stopped else f"the logs are in {folder}/logs/{job.attempt}"
    raise kind(f"{folder}: {ended.reason}; {more}")


def _wait(job: LocalJob, clock: SystemClock) -> LocalJobResult:
    """Wait until the processes of a local run have ended, complete the files of the run, and return how it ended."""
    while job.running():
        clock.sleep(local_run.POLL_S)
    with owner_only():
        return job.wait(lambda: None)


@contextlib.contextmanager
def _on_sigterm(stop: Callable[..., None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, with which `cancel` and `hpctrain cancel` stop a run."""
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _machine_warnings(run: Run, count: int) -> Iterator[str]:
    yield from check_gpus(count, run.cluster.device, os.environ)
    yield from login_node_words(count, Slurm(SystemRunner()), os.environ)
