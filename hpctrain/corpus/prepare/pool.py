"""A pool of worker processes that gives results in the order of the tasks, with few results in memory at a time.

`concurrent.futures` runs the tasks. The pool adds what `concurrent.futures` lacks: workers end when their parent is
killed, they can be stopped in the middle of a task, and they report progress. The module also measures the memory of
this process and of its workers.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hpctrain.base.errors import FileError, HpctrainError, InputError
from hpctrain.base.module_argv import outside_current_folder
from hpctrain.base.system.kernel import kernel_text

AHEAD = 2
"""Tasks per worker process that are submitted before the oldest result is waited for."""
_POLL_S = 0.1
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
_advanced: Any = None
"""In a worker process: the sum of the progress of all workers' tasks, a number in shared memory."""

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Task(Protocol[R_co]):
    """A piece of work that can be pickled and sent to a worker process."""

    def run(self, report: Callable[[int], None]) -> R_co:
        """Do the work and return its result. `report` is called with each further amount of progress, in any unit."""


class WorkerPool:
    """Runs tasks in worker processes, which start when they are needed; a pool of one worker runs its tasks in this
    process."""

    def __init__(self, workers: int) -> None:
        self._count = workers
        self._executor: _Executor | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, tasks: Iterable[Task[R]], report: Callable[[int], None]) -> Generator[R, None, None]:
        """Yield the results in the order of the tasks. `report` is called with each further amount of progress of any
        task, in the tasks' own unit.

        Raises:
            HpctrainError: a task raised it, or a worker process was killed; the other tasks are stopped.
        """
        if self._count == 1:
            for task in tasks:
                yield task.run(report)
            return
        self._executor = executor = self._executor or _Executor(self._count)
        started: deque[Future[R]] = deque()
        done = False
        try:
            for task in tasks:
                started.append(executor.submit(task))
                if len(started) == AHEAD * self._count:
                    yield executor.result(started.popleft(), report)
            while started:
                yield executor.result(started.popleft(), report)
            done = True
        except BrokenProcessPool:
            raise executor.loss() from None
        finally:
            if not done:
                self._stop()

    def _stop(self) -> None:
        if self._executor is not None:
            self._executor.stop()
        self._executor = None


class _Executor:
    """The worker processes of a pool, which can be stopped in the middle of their tasks."""

    def __init__(self, workers: int) -> None:
        # Not by fork: libraries here have threads, and a fork could copy a lock that is held.
        context = multiprocessing.get_context("spawn")
        self._others = set(multiprocessing.active_children())
        self._processes: set[Any] = set()
        with outside_current_folder() as here:  # multiprocessing's resource tracker is started
            self._advanced = context.Value("q")
            self._pool = ProcessPoolExecutor(workers, context, _begin, (here, self._advanced))
        self._reported = 0

    def submit(self, task: Task[R]) -> Future[R]:
        with outside_current_folder():  # a process may be started now
            future = self._pool.submit(_run, task)
        self._processes.update(set(multiprocessing.active_children()) - self._others)
        return future

    def result(self, future: Future[R], report: Callable[[int], None]) -> R:
        """Wait for the result of a task and return it; meanwhile, pass the progress of all tasks to `report`. An error
        of the task is raised here."""
        done = False
        while not done:
            done = bool(wait([future], _POLL_S).done)
            advanced = self._advanced.get_obj().value  # without the lock, which a killed worker may hold
            if advanced > self._reported:
                report(advanced - self._reported)
                self._reported = advanced
        return future.result()

    def loss(self) -> HpctrainError:
        """Stop the pool, and return an error that names the exit code of the worker process that ended by itself. The
        pool has ended the other processes by SIGTERM, so a different exit code is preferred."""
        self.stop()
        codes = {process.exitcode for process in self._processes} - {0, None}
        code = min(codes - {-signal.SIGTERM} or codes, default=0)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return HpctrainError(
            f"a worker process ended {how}; where memory is short, use fewer --workers (signal 9 often means that)"
        )

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


def _begin(folder: Path, advanced: Any) -> None:
    """Prepare a worker process: make `folder` its working directory, store `advanced` (a number in shared memory, to
    which tasks add the bytes that they have done), and end the process when its parent has ended."""
    global _advanced
    _advanced = advanced
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other workers use the cores
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _run(task: Task[R]) -> R:
    try:
        return task.run(_advance)
    except FileError as error:  # it cannot be sent to another process
        raise InputError(str(error)) from None


def _advance(count: int) -> None:
    with _advanced.get_lock():
        _advanced.value += count


def _end_with_parent() -> None:
    """Wait until the parent process has ended, then end this one. Otherwise, workers of a killed command would go on
    writing to the folder that the next command uses."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class PeakMemory(NamedTuple):
    """Peak resident memory of this process and of its children; a page that processes share counts in each of them."""

    own_bytes: int
    """Peak of this process."""
    worker_bytes: int
    """Peak of the largest child process that has ended; 0 if there was none."""


def peak_memory() -> PeakMemory:
    """Return the peak resident memory of this process and of its ended child processes, each since its start."""
    # ru_maxrss begins with the peak of the parent process; VmHWM does not.
    status = kernel_text(Path("/proc/self/status")) or ""
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    own, worker = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return PeakMemory(int(peak[1]) * 1024 if peak else own * _MAXRSS_BYTES, worker * _MAXRSS_BYTES)
