"""Runs a function in several processes of this machine, forked from one that has loaded torch, and collects the
results."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.base.system.kernel import die_with_parent
from hpctrain.model.imported.user_error import outcome

Result = TypeVar("Result")


def run_forked(world: int, body: Callable[[int], Result], less_memory: str = "use fewer processes") -> list[Result]:
    """Return [body(0), body(1), …], each computed in a process of its own. If `world` is 1, body(0) is computed in this
    process.

    The calling process must not have used a GPU or started threads, which do not survive a fork. When one process
    fails, the others are ended. All end with the calling process. Unless OMP_NUM_THREADS is set, the processes share
    the cores equally.

    Args:
        world: number of processes.
        body: the function, which gets the number of its process. Its result is pickled.
        less_memory: what a person can do so that less memory is used, for the error of a process that was killed.

    Raises:
        InputError: a process raised it.
        HpctrainError: a process failed; the message is that of its error. If `world` is 1, the error of `body` itself
            is raised instead.
    """
    # gloo must listen on the loopback interface, whatever interface the host name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world == 1:
        return [body(0)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    parent = os.getpid()
    processes = [
        context.Process(target=_answer, args=(body, rank, world, pipes[rank][1], parent), daemon=True)
        for rank in range(world)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        return _collect({ours: rank for rank, (ours, _) in enumerate(pipes)}, processes, less_memory)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _collect(waiting: dict[Connection, int], processes: list[Any], less_memory: str) -> list[Any]:
    """Return the result of each process, by its number.

    Args:
        waiting: end of a process's pipe -> number of the process; emptied.
        processes: the processes, by number.
    """
    results: list[Any] = [None] * len(processes)
    while waiting:
        for ready in wait(list(waiting)):
            assert isinstance(ready, Connection), "only pipes are waited for"
            rank = waiting.pop(ready)
            try:
                code, results[rank] = ready.recv()
            except EOFError:
                processes[rank].join()
                end = _end(processes[rank].exitcode, less_memory)
                raise HpctrainError(f"process {rank} of {len(processes)} {end}") from None
            if code:
                raise (InputError if code == InputError.exit_code else HpctrainError)(results[rank])
    return results


def _end(code: int, less_memory: str) -> str:
    if code != -signal.SIGKILL:
        return f"ended with code {code}"
    return f"was killed (signal 9), perhaps because memory ran out: {less_memory}"


def _answer(body: Callable[[int], Any], rank: int, world: int, pipe: Connection, parent: int) -> None:
    """Send (0, result of `body`) or (exit code, message of the error) through the pipe, and end this process."""
    die_with_parent(parent)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cpus() // world))
    pipe.send(outcome(lambda: body(rank)))
    pipe.close()
    # Threads of gloo may still wait for ranks that are gone, and a normal exit would wait for these threads.
    os._exit(0)
