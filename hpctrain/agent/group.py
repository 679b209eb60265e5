"""The workers of one node in one generation: started by command line, controlled by JSON lines, killed together."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.agent.decide import WorkerView
from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.post_mortem import KERNEL_LOG, KERNEL_LOG_WINDOW_S, abort_cause, hardware_fault
from hpctrain.agent.worker_failure import WorkerFailure, failure_from_evidence, failure_from_message
from hpctrain.base.activity import ActivityRecord, read_record, shared_record
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_RESUMABLE
from hpctrain.base.net.wire import LineChannel, Message
from hpctrain.base.process import WORKER, Process, Runner

KILL_WAIT_S = 10.0


@dataclass
class WorkerProcess:
    """A started worker."""

    rank: int
    process: Process
    channel: LineChannel
    activity: int
    """Descriptor of its activity record."""
    log: Path
    log_start: int
    """Bytes of its log that earlier workers wrote."""
    exit_code: int | None = None
    failure: WorkerFailure | None = None
    raised: bool = False
    """Whether `failure` is its own error, and not the loss of a peer; such a worker ends at once."""
    compiling: bool = True
    """Whether it may be compiling: blocks are compiled in the first step, and again when the worker says so."""


@dataclass(frozen=True)
class WorkerUpdate:
    """A message of a worker, or its end."""

    rank: int
    message: Message = field(default_factory=dict)
    exit_code: int | None = None
    doing: ActivityRecord | None = None
    """At its end: its last activity."""
    failure: WorkerFailure | None = None
    """At its end: why it ended, where that is known."""

    def death(self, node: str) -> tuple[str, Message]:
        """Return reason and data of the event for a worker that ended unexpectedly."""
        code = self.exit_code or 0
        how, data = (f"signal {-code}", {"signal": -code}) if code < 0 else (f"exit code {code}", {"exit_code": code})
        event: Message = {"node": node, "rank": self.rank, **data}
        if self.doing is not None:
            event |= {"step": self.doing.step, "operation": self.doing.words()}
        if self.failure is not None:
            event |= self.failure.to_event()
        return f"the worker of {node} (rank {self.rank}) ended by {how}", event


class WorkerGroup:
    """Starts, watches and ends the workers of this node."""

    def __init__(
        self, folder: Path, logs: Path, node: str, runner: Runner, env: Mapping[str, str], kernel_log: Path = KERNEL_LOG
    ) -> None:
        self._folder = folder
        self._logs = logs
        self._node = node
        self._runner = runner
        self._env = dict(env)
        self._kernel_log = kernel_log
        self._started = 0.0
        self.workers: list[WorkerProcess] = []
        self._last_progress = 0.0

    def start(self, now: float, orders: Mapping[int, Message], store: socket.socket | None) -> None:
        """Start one worker a rank and hand it its start order.

        Args:
            orders: rank -> content of the `start` message.
            store: the listening socket of the generation's store; rank 0's worker inherits it.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        self._last_progress = self._started = now
        for local_rank, (rank, order) in enumerate(orders.items()):
            ours, theirs = socket.socketpair()
            keep = [theirs.fileno()]
            content = dict(order)
            if rank == 0 and store is not None:
                keep.append(store.fileno())
                content["store"] = {**content["store"], "fd": store.fileno()}
            argv = [*WORKER, "train", "--folder", str(self._folder)]
            activity = shared_record()
            keep.append(activity)
            argv += ["--fd", str(theirs.fileno()), "--activity", str(activity)]
            env = {**self._env, "LOCAL_RANK": str(local_rank), "RANK": str(rank)}
            log = self._logs / f"{self._node}.{local_rank}.log"
            written = log.stat().st_size if log.exists() else 0
            process = self._runner.start(argv, env=env, log=log, keep_fds=keep)
            theirs.close()
            channel = LineChannel(ours)
            channel.send({"type": "start", **content})
            self.workers.append(WorkerProcess(rank, process, channel, activity, log, written))

    def channels(self) -> list[LineChannel]:
        """Return the open channels, to wait on."""
        return [worker.channel for worker in self.workers if not worker.channel.closed]

    def news(self, now: float) -> list[WorkerUpdate]:
        """Return the messages and ends of workers since the last call."""
        self._runner.reap()
        found: list[WorkerUpdate] = []
        for worker in self.workers:
            if worker.exit_code is not None:
                continue
            code = worker.process.poll()
            for message in worker.channel.receive():
                self._last_progress = now
                kind = message.get("type")
                if kind in ("error", "lost"):
                    worker.failure = failure_from_message(worker.rank, message)
                    worker.raised = kind == "error"
                elif kind in ("compiling", "step"):
                    worker.compiling = kind == "compiling"
                found.append(WorkerUpdate(worker.rank, message))
            if code is not None:
                worker.exit_code = code
                worker.failure = self._failure(worker, code, now)
                doing = read_record(worker.activity)
                found.append(WorkerUpdate(worker.rank, exit_code=code, doing=doing, failure=worker.failure))
        return found

    def _failure(self, worker: WorkerProcess, code: int, now: float) -> WorkerFailure | None:
        """Return why a worker ended: its own message, unless the kernel's log names a hardware fault of this node, or
        the worker's log an abort."""
        said = worker.failure
        if code in (0, EXIT_RESUMABLE) or (said is not None and said.fault.names_a_node):
            return said
        seen = hardware_fault(max(self._started, now - KERNEL_LOG_WINDOW_S), self._kernel_log)
        if seen is None and said is None and code == -signal.SIGABRT:
            seen = abort_cause(worker.log, worker.log_start)
        return said if seen is None else failure_from_evidence(said, worker.rank, *seen)

    def view(self) -> WorkerView:
        """Return the state of the workers as one value; its exit code is the one that explains most."""
        codes = [worker.exit_code for worker in self.workers if worker.exit_code is not None]
        running = len(self.workers) - len(codes)
        # A worker that lost its peers is a consequence; the end of the worker beside it is the cause.
        causes = [code for code in codes if code not in (0, EXIT_INFRASTRUCTURE)]
        bad = causes or [code for code in codes if code != 0]
        exit_code = bad[0] if bad else 0 if self.workers and not running else None
        told = [worker for worker in self.workers if worker.failure]
        told.sort(key=lambda worker: worker.exit_code != exit_code)
        failure = told[0].failure if told else None
        error = failure.sentence if failure is not None else None
        compiling = any(worker.compiling for worker in self.workers if worker.exit_code is None)
        leaving = any(worker.raised for worker in self.workers if worker.exit_code is None)
        return WorkerView(running, exit_code, self._last_progress, compiling, error, leaving=leaving, failure=failure)

    def doing(self, places: Sequence[str]) -> tuple[WorkerActivity, ...]:
        """Return what each running worker does; workers without a record yet are left out.

        Args:
            places: the device of each rank.
        """
        found = []
        for worker in self.workers:
            now = read_record(worker.activity) if worker.exit_code is None else None
            if now is not None:
                state = _STATES.get(process_state(worker.process.pid), "")
                found.append(WorkerActivity(worker.rank, places[worker.rank], now.step, now.words(), now.waits, state))
        return tuple(found)

    def tell(self, kind: str) -> None:
        """Send `save` or `stop` to every worker."""
        for worker in self.workers:
            worker.channel.send({"type": kind})

    def kill(self) -> None:
        """Kill every worker with SIGKILL; after return none of them runs."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.process.kill()
        for worker in self.workers:
            if worker.exit_code is None:
                worker.exit_code = worker.process.wait(KILL_WAIT_S)
            worker.channel.close()
            os.close(worker.activity)
        self.workers = []


_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the system (disk or driver)"}
"""Process states, as /proc names them, in which a process cannot run although it has work."""


def process_state(pid: int) -> str:
    """Return the state of a process as one letter, as in `ps`; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()[0]


def process_incarnation(host: str, started: float) -> str:
    """Return a name that no other agent process ever has."""
    return f"{host}-{os.getpid()}-{int(started * 1e6)}"
