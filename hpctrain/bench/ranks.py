"""Starts the processes of a bench together, and returns the result of rank 0."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hpctrain.base.errors import HpctrainError
from hpctrain.base.module_argv import outside_current_folder
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.bench.comparison import TimeSample

Answer = TypeVar("Answer")


def run_ranks(body: Callable[..., Answer], world: int, *arguments: object) -> Answer:
    """Call `body(rank, world, *arguments)` in `world` new processes, and return what it returned on rank 0.

    The machine's cores are divided equally among the processes. All processes have ended when the function returns or
    raises, also when a signal ends the bench.

    Raises:
        HpctrainError: a process failed; the message has its traceback.
    """
    with tempfile.NamedTemporaryFile() as answer:
        try:
            with outside_current_folder() as here:
                ranks = mp.spawn(_rank, (world, body, arguments, answer.name, here), nprocs=world, join=False)
            try:
                while not ranks.join():
                    pass
            finally:
                # Python waits at its exit for processes that still run: a bench of minutes would not end on SIGTERM.
                for process in ranks.processes:
                    process.terminate()
                    process.join()
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise HpctrainError(f"a process of the bench failed: {error}") from None
        given: Answer = pickle.loads(Path(answer.name).read_bytes())
        return given


def _rank(
    rank: int, world: int, body: Callable[..., Any], arguments: tuple[object, ...], answer: str, folder: Path
) -> None:
    os.chdir(folder)
    threads = max(1, usable_cpus() // world)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for `build`, which sets torch's number of threads from it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    given = body(rank, world, *arguments)
    if rank == 0:
        Path(answer).write_bytes(pickle.dumps(given))


def timed(step: Callable[[], object], count: int) -> TimeSample:
    """Return the time of one step, as the mean of `count` steps between two barriers. CPU seconds are summed over
    all ranks. Collective."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    dist.barrier()
    wall_s = (time.perf_counter() - start) / count
    cpu_s = torch.tensor((time.process_time() - cpu_start) / count, dtype=torch.float64)
    dist.all_reduce(cpu_s)
    return TimeSample(wall_s, float(cpu_s))


def leave_process_group() -> None:
    """Leave the process group once all processes have called this function."""
    dist.barrier()
    dist.destroy_process_group()
