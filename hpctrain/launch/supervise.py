"""A run as local processes: one node process for each virtual node, watched until the last of them ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.process import Process, Runner
from hpctrain.launch.folder import RunFolder, RunLock
from hpctrain.launch.local import local_nodes, start_local_node
from hpctrain.records.event import read_events

POLL_S = 0.2
RESUMABLE = 75


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    exit_code: int
    reason: str


class LocalJob:
    """The node processes of one attempt."""

    def __init__(self, folder: RunFolder, attempt: int, processes: dict[str, Process], clock: Clock) -> None:
        self.folder = folder
        self.attempt = attempt
        self.processes = processes
        self._clock = clock

    def running(self) -> bool:
        """Whether any node process still runs."""
        return any(process.poll() is None for process in self.processes.values())

    def stop(self) -> None:
        """Ask every node to save a checkpoint and leave."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()

    def kill(self) -> None:
        """End every node process at once; its workers end with it."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()

    def wait(self, tick: Callable[[], None]) -> Ended:
        """Wait for the end, calling `tick` between looks; the attempt's line is completed."""
        while self.running():
            tick()
            self._clock.sleep(POLL_S)
        tick()
        ended = self._ended()
        self.folder.end_attempt(self.attempt, self._clock.wall(), ended.reason)
        return ended

    def _ended(self) -> Ended:
        codes = [process.poll() for process in self.processes.values()]
        last = self._last_words()
        if 0 in codes:
            return Ended(0, last or "all steps are done")
        # A node that was killed (below 0) is not the reason why the others ended.
        own = [code for code in codes if code is not None and code > 0]
        code = own[0] if own else 1
        if code == RESUMABLE:
            return Ended(RESUMABLE, last or "stopped at a checkpoint on request")
        # 77, no progress, is a failure for the person at the terminal; 2 and 4 keep their meaning.
        return Ended(code if code in (1, 2, 4) else 1, last or "all node processes were killed")

    def _last_words(self) -> str | None:
        events = read_events(self.folder.path / "events.jsonl")
        for event in reversed(events):
            if event.attempt == self.attempt and event.kind in ("failed", "finished", "preempted"):
                return event.reason
        return None


def start_local_job(folder: RunFolder, count: int, lock: RunLock, runner: Runner, clock: Clock) -> LocalJob:
    """Start `count` virtual nodes on the run folder.

    Raises:
        StorageError: the folder cannot be written.
        CommandError: a process cannot be started.
    """
    nodes = local_nodes(count)
    attempt = folder.begin_attempt(nodes, clock.wall())
    logs = folder.path / "logs" / str(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    job = LocalJob(folder, attempt, {}, clock)
    try:
        for node in nodes:
            job.processes[node] = _start(folder.path, node, nodes, attempt, logs, lock, runner)
    except BaseException:
        job.kill()
        raise
    return job


def _start(
    folder: Path, node: str, nodes: list[str], attempt: int, logs: Path, lock: RunLock, runner: Runner
) -> Process:
    return start_local_node(
        "run",
        folder,
        node,
        nodes,
        runner,
        logs / f"{node}.agent.log",
        extra=("--attempt", str(attempt)),
        keep_fds=(lock.descriptor,),
    )
