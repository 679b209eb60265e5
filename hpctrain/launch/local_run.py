"""Starts and resumes runs as processes of this machine, one for each virtual node, and waits until the last process has
ended."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import psutil

from hpctrain.base.clock import Clock
from hpctrain.base.errors import EXIT_RESUMABLE, InputError, RefusedError
from hpctrain.base.process import WORKER_NAME, Process, Runner
from hpctrain.jobs.attempt_outcome import read_outcome
from hpctrain.launch.container_command import TRACKER_LOG, check_container, tracker_command
from hpctrain.launch.local import LocalNodes, check_gpus, local_nodes
from hpctrain.launch.preflight.changed_settings import run_with_changes, write_changed_settings
from hpctrain.launch.preflight.checks import check_plan, drop_stale_topology
from hpctrain.launch.preflight.prepare import PreparedRun, fewest_nodes, make_folder, resolve_run
from hpctrain.records.history.ledger import ExitClass
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import NotifyState, Run, run_of
from hpctrain.runs.code_copy import CODE_FOLDER
from hpctrain.runs.folder import (
    RunFolder,
    check_path,
    check_trusted,
    lock_run_folder,
    newest_plan,
    resume_text,
)
from hpctrain.runs.locate import is_trusted_run
from hpctrain.runs.lost_checkpoints import lost_checkpoints_text, restarting_from_seed
from hpctrain.runs.notify import send_notification


def start(prepared: PreparedRun, base: Path, runner: Runner, clock: Clock) -> LocalJob:
    """Create a run folder in the folder `base`, start a process for each virtual node, and return the running attempt.

    Raises:
        StorageError: the run folder cannot be written.
        InputError: `code` of the run file is no folder, or too large to be code; or the path of the run folder holds a
            control character.
        CommandError: a process cannot be started; the run folder is left.
    """
    folder = make_folder(prepared, base, runner, clock)
    # The node processes hold the lock too: it becomes free when the last of them ends, even if this process dies.
    with lock_run_folder(folder.path) as lock:
        return start_local_job(folder, len(prepared.nodes), lock, runner, clock)


def resume(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, clock: Clock, from_seed: bool = False
) -> LocalJob:
    """Continue the run in the folder `path` from its newest checkpoint, and return the running attempt.

    Args:
        count: number of virtual nodes; None: as many nodes as in the last attempt.
        overrides: changed settings, written key=value.
        from_seed: begin again with step 0 instead; existing checkpoints are renamed.

    Raises:
        InputError: the folder is in use, holds no run, or others can write to it; a setting may not change, or changes
            the model; the image does not exist; `cluster.device` is cuda, and there are fewer GPUs than nodes; or the
            plan in the folder cannot be executed.
        FileError: the run file or an override is wrong, or the plan in the folder is not for this run.
        StorageError: the run folder cannot be written; the run's settings are unchanged.
        RefusedError: every checkpoint that the run had saved is lost, or the plan in the folder is provisional.
        CommandError: a process cannot be started; the run's settings are unchanged.
        HpctrainError: the process that builds the model failed.
        OSError: topology.json cannot be renamed.
    """
    going = check_resumed(path, count, overrides, runner, from_seed)
    folder = RunFolder(going.path)
    with lock_run_folder(folder.path) as lock:
        if not from_seed and (lost := lost_checkpoints_text(folder.path)) is not None:
            raise RefusedError(lost)
        with write_changed_settings(folder, going.run):
            _check_edited_plan(folder.path, going.run, going.spec)
            wanted = going.run.cluster.devices_per_node
            drop_stale_topology(folder, local_nodes(going.count), clock.wall(), devices_per_node=wanted)
            with restarting_from_seed(folder, clock.wall()) if from_seed else contextlib.nullcontext():
                return start_local_job(folder, going.count, lock, runner, clock)


@dataclass(frozen=True)
class ResumedRun:
    """A run that passed all checks for continuing on this machine."""

    path: Path
    """The run folder."""
    run: Run
    """The run with its new settings."""
    spec: Spec
    """The run's model."""
    count: int
    """Number of virtual nodes."""


def check_resumed(
    path: Path, count: int | None, overrides: tuple[str, ...], runner: Runner, from_seed: bool = False
) -> ResumedRun:
    """Return the run in the folder `path` with its new settings, after checking that it can continue; nothing is
    written.

    Args:
        count: number of virtual nodes; None: as many nodes as in the last attempt.
        overrides: changed settings, written key=value.
        from_seed: whether the run begins again, so that the settings need not fit a checkpoint.

    Raises:
        InputError: the folder holds no run, or others can write to it; a setting may not change, or changes the model;
            the image does not exist; or `cluster.device` is cuda, and there are fewer GPUs than nodes.
        FileError: the run file or an override is wrong.
        HpctrainError: the process that builds the model failed.
    """
    path = path.resolve()
    check_path(path)
    check_trusted(path)
    if not is_trusted_run(path):
        raise InputError(f"{path}: no run.yaml in it; give a run folder, as `hpctrain status` lists them")
    changed = run_with_changes(path, overrides, from_seed)
    code = path / CODE_FOLDER
    _, spec = resolve_run(changed, runner, code if code.is_dir() else None)
    check_container(changed.container, True, shutil.which)
    if spec.sha256() != changed.spec().sha256():
        raise InputError(f"{path}: a run keeps its model (and its tokenizer); start a new run to train another one")
    attempts = RunFolder(path).attempts()
    count = count or (len(attempts[-1]["nodes"]) if attempts else fewest_nodes(changed))
    check_gpus(count, changed.cluster.device, os.environ)
    return ResumedRun(path, changed, spec, count)


def _check_edited_plan(path: Path, run: Run, spec: Spec) -> None:
    """Check the newest plan in the run folder `path`, which a person may have edited, so that an error shows before the
    nodes start.

    Raises:
        FileError, InputError: the plan cannot be run.
        RefusedError: the plan is provisional.
    """
    plan_file = newest_plan(path)
    if plan_file is not None:
        plan = Plan.read(plan_file, owned=True)
        # The plan is checked for its nodes; if the job gets other nodes, it makes a new plan.
        check_plan(plan, run, spec, plan.nodes, str(plan_file))


POLL_S = 0.2
"""Seconds between two looks at whether node processes have ended."""
TRACKER_END_S = 30.0
"""Seconds that trackers have for the last metrics after the end of an attempt; `hpctrain track` adds what they lack."""


@dataclass(frozen=True)
class LocalJobResult:
    """How an attempt of a local run ended."""

    exit_code: int
    """Exit code of `hpctrain train`: 0 done, 1 failed or stopped, 2 wrong input, 4 refused."""
    reason: str
    """Why the attempt ended, as a sentence."""
    stopped: bool = False
    """Whether a person asked the attempt to stop."""


class LocalJob:
    """The node processes of one attempt of a local run."""

    def __init__(self, folder: RunFolder, attempt: int, clock: Clock) -> None:
        self.folder = folder
        self.attempt = attempt
        self.processes: dict[str, Process] = {}
        """Name of a virtual node -> its process."""
        self.tracker: Process | None = None
        """The process that writes metrics into trackers, if the run file names some."""
        self._clock = clock
        self._killed = False

    def running(self) -> bool:
        """Return whether any node process still runs."""
        return any(process.poll() is None for process in self.processes.values())

    def stop(self) -> None:
        """Ask every node to save a checkpoint and stop."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()

    def kill(self) -> None:
        """Kill every node process at once; a node's workers end with its process."""
        self._killed = True
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        if self.tracker is not None:
            self.tracker.terminate()

    def kill_workers(self, node: str) -> bool:
        """Kill the workers of a virtual node, and not its agent, as a fault would; return whether there was any."""
        killed = False
        for child in psutil.Process(self.processes[node].pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name().startswith(WORKER_NAME.format("")):
                    child.kill()
                    killed = True
        return killed

    def wait(self, tick: Callable[[], None]) -> LocalJobResult:
        """Wait until all node processes have ended, complete the attempt's line in attempts.jsonl, send the run's
        notification, and return how the attempt ended.

        Args:
            tick: called every POLL_S seconds while a process runs, and once afterwards.

        Raises:
            FileError, UntrustedError: events.jsonl or attempts.jsonl is damaged or untrusted.
            StorageError: attempts.jsonl cannot be written.
        """
        while self.running():
            tick()
            self._clock.sleep(POLL_S)
        tick()
        if self.tracker is not None:
            self.tracker.terminate()
            if self.tracker.wait(TRACKER_END_S) is None:
                self.tracker.kill()
        events = read_events(self.folder.path / "events.jsonl", self.attempt)
        ended = self._ended(events)
        outcome = read_outcome(ended.exit_code, events, ended.exit_code == 0).exit_class
        kind: ExitClass = "resumable" if ended.stopped else outcome
        if self._killed and ended.stopped:
            # Its killed agents could not write why the run ended.
            self.folder.append_event("failed", ended.reason, self.attempt, self._clock.wall(), cancelled=True)
        self.folder.end_attempt(self.attempt, self._clock.wall(), ended.reason, ended.exit_code, kind, events)
        state: NotifyState = "done" if ended.exit_code == 0 else "cancelled" if ended.stopped else "failed"
        send_notification(self.folder.path, self.attempt, state, ended.reason, self._clock, os.environ)
        return ended

    def _ended(self, events: Sequence[Event]) -> LocalJobResult:
        codes = [process.poll() for process in self.processes.values()]
        words = {event.kind: event.reason for event in events}  # of the last event of each kind
        if 0 in codes:
            return LocalJobResult(0, words.get("finished") or "all steps are done")
        if self._killed:
            return LocalJobResult(1, f"ended at once on request; {resume_text(self.folder.path)}", stopped=True)
        if "failed" in words:
            # A killed node (negative code) is not the reason why the others ended.
            failures = [code for code in codes if code is not None and code > 0]
            why = read_outcome(1, events, False).reason
            return LocalJobResult(failures[0] if failures and failures[0] in (2, 4) else 1, why or words["failed"])
        if EXIT_RESUMABLE in codes:
            return LocalJobResult(1, f"stopped on request; {resume_text(self.folder.path)}", stopped=True)
        failed = next((code for code in codes if code in (2, 4)), 1)
        why = words.get("agent_crashed") or "all node processes were killed or ended early"
        return LocalJobResult(failed, f"{why}; {resume_text(self.folder.path)}")


def start_local_job(folder: RunFolder, count: int, lock: FileIO, runner: Runner, clock: Clock) -> LocalJob:
    """Start `count` virtual nodes on the run folder, as a new attempt, and return the started processes.

    Args:
        lock: the locked file of the run folder; the node processes inherit its descriptor, and so hold the lock.

    Raises:
        StorageError: the folder cannot be written.
        CommandError: a process cannot be started.
        FileError, UntrustedError: a file of the run is damaged or untrusted.
    """
    nodes = local_nodes(count)
    for line in folder.open_attempts():
        number, killed = line["attempt"], "ended without a word: killed"
        events = read_events(folder.path / "events.jsonl", number)
        folder.end_attempt(number, clock.wall(), killed, None, "infrastructure", events)
    attempt = folder.begin_attempt(nodes, clock.wall())
    logs = folder.path / "logs" / str(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    run = run_of(folder.path)
    job, local = LocalJob(folder, attempt, clock), LocalNodes(folder.path, nodes, runner, run)
    try:
        for node in nodes:
            log, extra = logs / f"{node}.agent.log", ("--attempt", str(attempt))
            job.processes[node] = local.start("run", node, log, extra, keep_fds=(lock.fileno(),))
        if run.tracking.trackers:
            env = {**os.environ, "HPCTRAIN_ATTEMPT": str(attempt)}
            job.tracker = runner.start(tracker_command(folder.path), env, logs / TRACKER_LOG)
    except BaseException:
        job.kill()
        raise
    return job
