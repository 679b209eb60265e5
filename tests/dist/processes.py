"""Processes that work on one case after the other, and the answer of the first of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Body = Callable[[Path, int, int], dict[str, Any]]
"""Folder, rank, world -> the results by case; those of rank 0 are taken."""


def run_cases(script: Path, what: str, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """`python SCRIPT WHAT WORLD FOLDER`, which calls `launch`, to its end."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), what, str(world), str(folder)],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


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
        timeout=timedelta(seconds=60),
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
