"""The workers of one node in one generation: the agent starts each by the command `hpctrain.worker train`, controls
them by messages, and kills them together.

Reports of workers and ends of workers become events of the run.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.view import WorkerView
from hpctrain.agent.worker_failure import (
    KERNEL_LOG,
    KERNEL_LOG_WINDOW_S,
    WorkerFailure,
    abort_cause,
    failure_from_evidence,
    failure_from_report,
    hardware_fault,
)
from hpctrain.agent.worker_messages import (
    ChangePlanOrder,
    CheckpointSaved,
    Compiling,
    NoDiskSpace,
    Report,
    ResidualsDropped,
    StartOrder,
    StepDone,
    StopOrder,
    WorkerError,
    read_report,
)
from hpctrain.base.activity import ActivityRecord, read_record, shared_record
from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import EXIT_DONE, EXIT_INFRASTRUCTURE, EXIT_NEW_PLAN, EXIT_RESUMABLE
from hpctrain.base.net.wire import LineChannel, MalformedMessage
from hpctrain.base.process import WORKER, Process, Runner
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named
from hpctrain.records.history.run_log import EventKind

KILL_WAIT_S = 2.0
"""Seconds to wait for the ends of workers that were killed; shorter than the heartbeat timeout, because the agent sends
no heartbeat meanwhile."""
EVIDENCE_S = 2.0
"""Longest time, in seconds, for which the end of a worker that aborted is not news yet, because its log is being
read."""


@dataclass(frozen=True)
class WorkerLog:
    """The log file of a device, open for the next worker."""

    path: Path
    descriptor: int
    size: int
    """Bytes of the file that earlier workers wrote."""

    def close(self) -> None:
        """Close the descriptor. This may wait for the file system."""
        os.close(self.descriptor)


@dataclass
class WorkerProcess:
    """A started worker, as its agent knows it."""

    rank: int
    """The worker's rank in the whole job."""
    process: Process
    channel: LineChannel
    """The agent channel to the worker."""
    activity: int
    """Descriptor of the worker's activity record in shared memory."""
    log: WorkerLog
    """Log file of the worker's device. The descriptor is closed."""
    exit_code: int | None = None
    """Exit code of the process; None while the worker runs."""
    failure: WorkerFailure | None = None
    """The worker's error; None while its agent knows none."""
    raised: bool = False
    """Whether `failure` is an error of this worker, and not the loss of a peer. A worker ends soon after its own
    error."""
    compiling: bool = True
    """Whether the worker may be compiling: it compiles blocks in its first step, and again after each report
    `compiling`."""
    evidence: tuple[float, Future[tuple[Fault, str] | None]] | None = None
    """Second of the agent's clock since when the log of the ended worker is being read, and what it says."""


@dataclass(frozen=True)
class WorkerUpdate:
    """News of a worker: a report, or the worker's end. At the end, `exit_code` is set and `report` is None."""

    rank: int
    """The worker's rank in the whole job."""
    report: Report | None = None
    exit_code: int | None = None
    doing: ActivityRecord | None = None
    """The worker's last activity, in an update about its end; None in a report, or if the worker recorded none."""
    failure: WorkerFailure | None = None
    """Why the worker ended, in an update about its end; None if the cause is not known."""

    def death(self, node: str) -> tuple[str, dict[str, Any]]:
        """Return (reason, data) of the event for a worker that ended unexpectedly.

        Args:
            node: where the worker ran.
        """
        code = self.exit_code or 0
        how, data = (f"signal {-code}", {"signal": -code}) if code < 0 else (f"exit code {code}", {"exit_code": code})
        event: dict[str, Any] = {"node": node, "rank": self.rank, **data}
        if self.doing is not None:
            event |= {"step": self.doing.step, "operation": self.doing.words()}
        if self.failure is not None:
            event |= self.failure.to_event()
        return f"the worker of {node} (rank {self.rank}) ended by {how}", event


class WorkerGroup:
    """Starts, watches and ends the workers of this node."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        node: str,
        runner: Runner,
        env: Mapping[str, str],
        files: Executor,
        kernel_log: Path = KERNEL_LOG,
    ) -> None:
        """Prepare to start workers.

        Args:
            folder: the run folder.
            logs: folder of the workers' log files.
            env: environment variables of the workers; `RANK` and `LOCAL_RANK` are added.
            files: reads and closes logs, because the file system may hang.
            kernel_log: as of `hardware_fault`.
        """
        self._folder = folder
        self._logs = logs
        self._node = node
        self._runner = runner
        self._env = dict(env)
        self._files = files
        self._kernel_log = kernel_log
        self._started = 0.0
        self.workers: list[WorkerProcess] = []
        self._last_progress = 0.0
        self._stuck: list[Process] = []
        """Killed workers that still run."""

    def open_logs(self, count: int) -> list[WorkerLog]:
        """Open the logs of `count` workers. It waits for the file system, so call it in another thread.

        Raises:
            StorageError: a log cannot be written.
        """
        with storage_errors(self._logs):
            self._logs.mkdir(parents=True, exist_ok=True)
            return [self._open_log(local_rank) for local_rank in range(count)]

    def _open_log(self, local_rank: int) -> WorkerLog:
        path = self._logs / f"{self._node}.{local_rank}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return WorkerLog(path, descriptor, os.fstat(descriptor).st_size)

    def start(
        self, now: float, orders: Sequence[StartOrder], store: socket.socket | None, logs: Sequence[WorkerLog]
    ) -> None:
        """Start one worker for each order, and send it the order.

        Args:
            now: seconds of the agent's clock.
            logs: an open log for each worker.
            store: the listening socket of the generation's store, which the worker of rank 0 inherits; None if rank 0
                is on another node.

        Raises:
            CommandError: a worker could not start.
            OSError: no descriptor is free.
        """
        self._last_progress = self._started = now
        for local_rank, (order, log) in enumerate(zip(orders, logs, strict=True)):
            ours, theirs = socket.socketpair()
            activity = shared_record()
            inherited = [theirs.fileno(), activity]
            if order.memory is not None:
                inherited += order.memory.descriptors
            if order.rank == 0 and store is not None:
                inherited.insert(1, store.fileno())
                order = order.model_copy(update={"store": order.store.model_copy(update={"fd": store.fileno()})})
            argv = [*WORKER, "train", "--folder", str(self._folder)]
            argv += ["--fd", str(theirs.fileno()), "--activity", str(activity)]
            env = {**self._env, "LOCAL_RANK": str(local_rank), "RANK": str(order.rank)}
            process = self._runner.start(argv, env=env, log=log.descriptor, keep_fds=inherited)
            self._files.submit(log.close)
            theirs.close()
            channel = LineChannel(ours, strict=True, compress=True)
            channel.send(order.to_json())
            self.workers.append(WorkerProcess(order.rank, process, channel, activity, log))

    def channels(self) -> list[LineChannel]:
        """Return the workers' open channels, so that the agent can wait for messages on them."""
        return [worker.channel for worker in self.workers if not worker.channel.closed]

    def news(self, now: float) -> list[WorkerUpdate]:
        """Return the reports and the ends of workers since the last call.

        Args:
            now: seconds of the agent's clock.
        """
        self._runner.reap()
        updates: list[WorkerUpdate] = []
        for worker in self.workers:
            if worker.exit_code is not None:
                continue
            code = worker.process.poll()
            for report in _receive(worker):
                self._last_progress = now
                if isinstance(report, WorkerError):
                    worker.failure = failure_from_report(worker.rank, report)
                    worker.raised = report.kind == "error"
                elif isinstance(report, Compiling | StepDone):
                    worker.compiling = isinstance(report, Compiling)
                updates.append(WorkerUpdate(worker.rank, report))
            if code is not None:
                # A worker whose channel was closed may end by itself before it is killed.
                code = -signal.SIGKILL if worker.channel.fault else code
                if self._reads_log(worker, code, now):
                    worker.raised = True
                    continue
                worker.exit_code = code
                worker.failure = self._failure(worker, code, now)
                doing = read_record(worker.activity)
                updates.append(WorkerUpdate(worker.rank, None, worker.exit_code, doing, worker.failure))
        return updates

    def _reads_log(self, worker: WorkerProcess, code: int, now: float) -> bool:
        """Return whether the log of an ended worker is still being read. Only that of a worker that aborted and has
        reported no error is read."""
        if code != -signal.SIGABRT or worker.failure is not None:
            return False
        if worker.evidence is None:
            worker.evidence = now, self._files.submit(abort_cause, worker.log.path, worker.log.size)
        since, reading = worker.evidence
        return not reading.done() and now - since < EVIDENCE_S

    def _failure(self, worker: WorkerProcess, code: int, now: float) -> WorkerFailure | None:
        """Return why a worker ended: its own report, unless the kernel's log names a hardware fault of this node or
        the worker's log a fault behind an abort. None if the worker did not fail, or if the cause is not known.

        Args:
            code: exit code of the worker.
        """
        reported = worker.failure
        if code in (EXIT_DONE, EXIT_RESUMABLE, EXIT_NEW_PLAN) or (reported is not None and reported.fault.names_a_node):
            return reported
        evidence = hardware_fault(max(self._started, now - KERNEL_LOG_WINDOW_S), self._kernel_log)
        if evidence is None and worker.evidence is not None and worker.evidence[1].done():
            evidence = worker.evidence[1].result()
        return reported if evidence is None else failure_from_evidence(reported, worker.rank, *evidence)

    def view(self) -> WorkerView:
        """Return the state of the workers as one value. If workers failed, the exit code is that of a worker that
        failed by itself, if there is one, and not that of a worker that lost its peers."""
        codes = [worker.exit_code for worker in self.workers if worker.exit_code is not None]
        running = len(self.workers) - len(codes)
        # A worker that lost its peers is a consequence; the end of the worker beside it is the cause.
        causes = [code for code in codes if code not in (0, EXIT_INFRASTRUCTURE)]
        bad = causes or [code for code in codes if code != 0]
        exit_code = bad[0] if bad else 0 if self.workers and not running else None
        failed = [worker for worker in self.workers if worker.failure]
        failure = min(failed, key=lambda worker: worker.exit_code != exit_code).failure if failed else None
        error = failure.sentence if failure is not None else None
        compiling = any(worker.compiling for worker in self.workers if worker.exit_code is None)
        leaving = any(worker.raised for worker in self.workers if worker.exit_code is None)
        return WorkerView(running, exit_code, self._last_progress, compiling, error, leaving=leaving, failure=failure)

    def doing(self, places: Sequence[str]) -> tuple[WorkerActivity, ...]:
        """Return the activity of each running worker; workers without an activity record yet are left out.

        Args:
            places: the device of each rank, written 'node:device'.
        """
        activities = []
        for worker in self.workers:
            now = read_record(worker.activity) if worker.exit_code is None else None
            if now is not None:
                state = _STATES.get(process_state(worker.process.pid), "")
                where = worker.rank, places[worker.rank], now.step
                activities.append(WorkerActivity(*where, now.words(), now.waits, state))
        return tuple(activities)

    def order(self, order: StopOrder | ChangePlanOrder) -> None:
        """Order every worker to exit after the step under way. The workers of the other nodes then do so, too."""
        for worker in self.workers:
            worker.channel.send(order.to_json())

    def kill(self) -> bool:
        """Kill every worker with SIGKILL, and wait for their ends, together at most `KILL_WAIT_S`. Return whether none
        runs any more. A killed worker may stay in a call of the system (a hanging disk or driver); a later call
        waits for no worker, and returns whether such workers have ended."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.process.kill()
        deadline = time.monotonic() + KILL_WAIT_S
        for worker in self.workers:
            if worker.exit_code is None and worker.process.wait(max(0.0, deadline - time.monotonic())) is None:
                self._stuck.append(worker.process)
                print(f"hpctrain agent: the worker of rank {worker.rank} was killed and still runs", flush=True)
            worker.channel.close()
            os.close(worker.activity)
        self.workers = []
        self._stuck = [process for process in self._stuck if process.poll() is None]
        return not self._stuck


def _receive(worker: WorkerProcess) -> list[Report]:
    """Return the reports that a worker has sent since the last call. A malformed report ends the worker."""
    reports = []
    try:
        for message in worker.channel.receive():
            reports.append(read_report(message))
    except MalformedMessage as error:
        worker.channel.refuse(str(error))
    if worker.channel.fault:
        sentence = f"rank {worker.rank}: its agent cannot read its messages: {worker.channel.fault}"
        worker.failure = WorkerFailure(worker.rank, sentence, fault_named(EXCEPTION), {"message": worker.channel.fault})
        worker.raised = True
        worker.process.kill()
    return reports


_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the system (disk or driver)"}
"""Letter of a process state in /proc -> words. In these states a process cannot run although it has work."""


def process_state(pid: int) -> str:
    """Return the state of a process as one letter, as in `ps`; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()[0]


def process_incarnation(host: str, started: float) -> str:
    """Return a name for this process that no other agent process ever has.

    Args:
        started: when the process started, in seconds since 1970.
    """
    return f"{host}-{os.getpid()}-{int(started * 1e6)}"


EXPECTED_EXIT_CODES = (EXIT_DONE, EXIT_RESUMABLE, EXIT_INFRASTRUCTURE, EXIT_NEW_PLAN)
"""Exit codes of workers that are done, were stopped on request or for another plan, or lost their peers."""

EventFields = tuple[EventKind, str, dict[str, Any]]
"""Kind, reason and data of an event."""


def event_of(node: str, update: WorkerUpdate) -> EventFields | None:
    """Return the event for a worker's report or end; None if no event follows from it.

    Args:
        node: where the worker ran.
    """
    match update.report:
        case CheckpointSaved(error=None) as saved:
            data = {"step": saved.step, "seconds": saved.seconds, "size_bytes": saved.size_bytes}
            return "checkpoint_saved", f"step {saved.step} is on disk", data
        case CheckpointSaved() as failed:
            return "checkpoint_skipped", f"step {failed.step} not saved: {failed.error}", {"step": failed.step}
        case NoDiskSpace() as full:
            return "waiting_for_room", full.reason, {"step": full.step}
        case ResidualsDropped() as dropped if update.rank == 0:
            return "residuals_dropped", dropped.reason, {}
    if update.exit_code is not None and update.exit_code not in EXPECTED_EXIT_CODES:
        return "worker_died", *update.death(node)
    return None
