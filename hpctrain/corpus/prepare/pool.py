"""A pool of worker processes that gives results in the order of the tasks, with few of them in memory.

`concurrent.futures` is not enough: its workers outlive a parent that is killed, end only with their task on an
interrupt, and cannot report progress.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpctrain.base.errors import FileError, HpctrainError, InputError
from hpctrain.base.module_argv import outside_current_folder

AHEAD = 2
"""Tasks per worker that may be started before the first one's result is taken."""
_END_S = 5.0

R_co = TypeVar("R_co", covariant=True)


class Task(Protocol[R_co]):
    """A task that can be sent to another process."""

    def run(self, report: Callable[[int], None]) -> R_co:
        """Do the task; call `report` with each amount of progress."""


class WorkerPool:
    """Worker processes, started when needed; with one worker, tasks run in this process."""

    def __init__(self, workers: int) -> None:
        self._count = workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, tasks: Iterable[Task[R_co]], report: Callable[[int], None]) -> Generator[R_co, None, None]:
        """The results, in the order of the tasks.

        Raises:
            HpctrainError: a task raised it, or a worker was killed; the other tasks are stopped.
        """
        if self._count == 1:
            for task in tasks:
                yield task.run(report)
            return
        if not self._workers:
            self._workers = [_start() for _ in range(self._count)]
        done = False
        try:
            yield from self._in_order(iter(tasks), report)
            done = True
        finally:
            if not done:
                self._stop()

    def _in_order(self, tasks: Iterator[Task[R_co]], report: Callable[[int], None]) -> Iterator[R_co]:
        idle = list(self._workers)
        busy: dict[Connection, tuple[_Worker, int]] = {}
        results: dict[int, Any] = {}
        sent = taken = 0
        more = True
        while more or busy:
            while more and idle and sent - taken < AHEAD * self._count:
                task = next(tasks, None)
                if task is None:
                    more = False
                    break
                worker = idle.pop()
                worker.send(task)
                busy[worker.connection] = (worker, sent)
                sent += 1
            if not busy:
                return  # the last results came together, before it was known that no task follows
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, number = busy[connection]
                kind, value = worker.receive()
                if kind == "advanced":
                    report(value)
                    continue
                if kind == "failed":
                    raise value
                results[number] = value
                idle.append(worker)
                del busy[connection]
            while taken in results:
                yield results.pop(taken)
                taken += 1

    def _stop(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        self._workers = []


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def send(self, task: Any) -> None:
        try:
            self.connection.send(task)
        except OSError:
            raise self._lost() from None

    def receive(self) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        return answer

    def _lost(self) -> HpctrainError:
        self.process.join(_END_S)
        code = self.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return HpctrainError(
            f"a worker process ended {how}; where memory is short, use fewer --workers (signal 9 often means that)"
        )


def usable_cpus() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start() -> _Worker:
    # Not by fork: libraries here have threads, and a fork could copy a lock that is held.
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    with outside_current_folder() as here:
        process = context.Process(target=_serve, args=(theirs, here), daemon=True)
        process.start()
    theirs.close()
    return _Worker(process, own)


def _serve(connection: Connection, folder: Path) -> None:
    """Run tasks one after the other in that folder, until the parent is gone."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other workers use the cores
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_answer(connection.recv(), lambda count: connection.send(("advanced", count))))


def _answer(task: Task[Any], report: Callable[[int], None]) -> tuple[str, Any]:
    try:
        return "done", task.run(report)
    except FileError as error:
        return "failed", InputError(str(error))
    except HpctrainError as error:
        return "failed", error
    except Exception:
        return "failed", RuntimeError(traceback.format_exc())


def _end_with_parent() -> None:
    """End with the parent: otherwise, workers of a killed parent would go on writing beside the next command."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
