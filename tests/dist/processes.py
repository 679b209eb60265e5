"""Processes that work on one case after the other, and the answer of the first of them."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Body = Callable[[Path, int, int], dict[str, Any]]
"""Folder, rank, world -> the results by case; those of rank 0 are taken."""


_WARM = mp.get_context("forkserver")
_WARM.set_forkserver_preload(["hpctrain.worker.train"])
"""Torch takes seconds to load: it is loaded once for all launches."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_LIMIT_S = 800


def run_cases(script: Path, what: str, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """`python SCRIPT WHAT WORLD FOLDER`, which calls `launch`, to its end."""
    with tempfile.TemporaryDirectory() as told:
        told_out, told_error = Path(told, "out"), Path(told, "error")
        process = _WARM.Process(target=_run, args=(script, [what, str(world), str(folder)], told_out, told_error))
        process.start()
        process.join(_LIMIT_S)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.exitcode == 0, told_error.read_text()[-4000:] or f"not done within {_LIMIT_S} s"
        results: dict[str, dict[str, Any]] = json.loads(told_out.read_text().strip().splitlines()[-1])
    return results


def _run(script: Path, argv: list[str], out: Path, error: Path) -> None:
    """Become that command, in a process that has torch already."""
    os.setsid()
    # Or a thread that sends is preempted by the one that it wakes while it holds the lock of gloo's pair, for which the
    # thread of gloo's loop then spins in epoll_wait: half of the system time of ranks that share few cores.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(_ENVIRONMENT)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


def launch(body: Body, world: int, folder: str) -> None:
    """Run the body in `world` processes and print what it gave on rank 0, as JSON."""
    with tempfile.NamedTemporaryFile() as results:
        # Forked, so that torch is loaded once and not once a process.
        mp.start_processes(_rank, (world, body, folder, results.name), nprocs=world, start_method="fork")
        print(Path(results.name).read_text())


def _rank(rank: int, world: int, body: Body, folder: str, results: str) -> None:
    torch.set_num_threads(1)
    found = body(Path(folder), rank, world)
    if rank == 0:
        Path(results).write_text(json.dumps(found))


@contextlib.contextmanager
def process_group(folder: Path, rank: int, world: int) -> Iterator[None]:
    """The default group over all processes of this launch."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/.store-{os.getppid()}", rank=rank, world_size=world,
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    yield
    dist.barrier()
    dist.destroy_process_group()


def largest(values: list[float]) -> float:
    """The largest of the values of all ranks. A value that is no number is an error: no comparison would see it."""
    mine = torch.tensor(values, dtype=torch.float64)
    assert mine.isfinite().all(), values
    everyone = mine.max()
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return float(everyone)
