"""Start the processes of a bench together, and return the result of rank 0."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hpctrain.agent.worker_messages import Report, StartOrder, StoreConnection
from hpctrain.base.errors import HpctrainError
from hpctrain.base.module_argv import outside_current_folder
from hpctrain.bench.comparison import TimeSample
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.build import Trainer, build
from hpctrain.worker.loop import Loop

Answer = TypeVar("Answer")


def run_ranks(body: Callable[..., Answer], world: int, *arguments: object) -> Answer:
    """Call `body(rank, world, *arguments)` in `world` new processes, and return its result on rank 0.

    The machine's cores are divided equally among the processes.

    Raises:
        HpctrainError: a process failed; the message has its traceback.
    """
    with tempfile.NamedTemporaryFile() as answer:
        try:
            with outside_current_folder() as here:
                ranks = mp.spawn(_rank, (world, body, arguments, answer.name, here), nprocs=world, join=False)
            while not ranks.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise HpctrainError(f"a process of the bench failed: {error}") from None
        given: Answer = pickle.loads(Path(answer.name).read_bytes())
        return given


def _rank(
    rank: int, world: int, body: Callable[..., Any], arguments: tuple[object, ...], answer: str, folder: Path
) -> None:
    os.chdir(folder)
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for `build`, which sets torch's number of threads from it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    given = body(rank, world, *arguments)
    if rank == 0:
        Path(answer).write_bytes(pickle.dumps(given))


def open_loop(rank: int, world: int, folder: Path, plan: Plan) -> tuple[Trainer, Loop]:
    """Return the trainer and the training loop of a worker process. The start order, which an agent makes in a run, is
    made here."""
    descriptor, meeting = None, dist.FileStore(str(folder / "meeting"), world)
    if rank == 0:
        plan.write(folder / "plan.json")
        server = socket.create_server(("127.0.0.1", 0))
        meeting.set("port", str(server.getsockname()[1]))
        descriptor = server.detach()
    port = int(meeting.get("port"))
    store = StoreConnection(addr="127.0.0.1", port=port, secret="bench", fd=descriptor)
    trainer = build(folder, StartOrder(plan="plan.json", rank=rank, generation=0, store=store))
    return trainer, loop_alone(trainer)


def loop_alone(trainer: Trainer) -> Loop:
    """Return a training loop that no agent watches."""
    return Loop(trainer, NoAgentChannel())  # type: ignore[arg-type]


class NoAgentChannel:
    """An agent channel without an agent: it requests nothing and drops all reports."""

    def stop_wanted(self) -> bool:
        return False

    def send(self, report: Report) -> None:
        pass


def timed(step: Callable[[], object], count: int) -> TimeSample:
    """Return the time per step of `count` steps between two barriers; processor seconds are summed over all ranks."""
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
