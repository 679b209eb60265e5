"""Small training runs for benches: a run folder with a small corpus, plans with given degrees, and processes that
train."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hpctrain
from hpctrain.agent.worker_messages import Report, StartOrder, StoreConnection
from hpctrain.base.errors import HpctrainError
from hpctrain.base.module_argv import outside_current_folder
from hpctrain.bench.comparison import TimeSample
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.model.families import DecoderSpec
from hpctrain.records.plan.plan import Plan, Replica, Stage, ZeroLevel
from hpctrain.records.run.data import Data
from hpctrain.records.run.model_choice import Model
from hpctrain.records.run.run import Batch, Checkpoint, Run, Validation
from hpctrain.worker.build import Trainer, build
from hpctrain.worker.loop import Loop

BYTES_VOCABULARY = 320
"""Vocabulary size of the models that train on the corpus of `make_corpus`, whose tokens are bytes."""
NEVER = 10**9
"""A step number that no bench reaches."""
Answer = TypeVar("Answer")


def make_corpus(folder: Path) -> None:
    """Write a corpus of hpctrain's own source text, which every machine has. Its tokens are bytes."""
    prepare([Path(hpctrain.__file__).parent], folder, PrepareOptions(valid_fraction=0.1, limit_bytes=400_000))


@contextlib.contextmanager
def temporary_corpus() -> Iterator[Path]:
    """Yield a temporary folder whose folder `corpus` is that of `make_corpus`. The temporary folder is removed at the
    end."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        make_corpus(Path(name, "corpus"))
        yield Path(name)


def make_run(folder: Path, corpus: Path, spec: DecoderSpec, rows: int, seq_len: int, **keys: Any) -> Run:
    """Create a run folder without plans and return its run. The run makes no checkpoints and no validations, unless
    `keys` say so.

    Args:
        rows: sequences in the global batch.
        keys: further keys of the run file.
    """
    settings: dict[str, Any] = {
        "steps": NEVER,
        "checkpoint": Checkpoint(every=NEVER),
        "validation": Validation(batches=0),
    }
    run = Run(
        model=Model(dims=spec),
        data=Data(train=[str(corpus)], seq_len=seq_len),
        batch=Batch.model_validate({"global": rows}),
        **(settings | keys),
    )
    folder.mkdir()
    run.write(folder / "run.yaml")
    return run


def make_plan(
    pp: int, dp: int, layers: int, micro_batch: int, micro_batches: int, *, tp: int = 1, zero: ZeroLevel = 0
) -> Plan:
    """Return a plan with equal stages, one per rank, and equal replicas, on the CPUs of pp × dp × tp virtual nodes.

    Args:
        layers: blocks of the model.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches of a replica in a step.
    """
    devices = [f"local{index}:cpu0" for index in range(pp * dp * tp)]
    cuts = [(stage * layers // pp, (stage + 1) * layers // pp) for stage in range(pp)]
    replicas = [
        Replica(
            sequences=micro_batch * micro_batches,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            devices=[devices[(stage * dp + replica) * tp :][:tp] for stage in range(pp)],
        )
        for replica in range(dp)
    ]
    stages = [Stage(layers=cut) for cut in cuts]
    return Plan(pp=pp, dp=dp, tp=tp, zero=zero, stages=stages, replicas=replicas, ranks=devices)


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
    """Return the trainer and the training loop of a worker process. The function makes the start order itself, because
    no agent sends one."""
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
    """Return a training loop of the trainer that no agent watches."""
    return Loop(trainer, NoAgentChannel())  # type: ignore[arg-type]


class NoAgentChannel:
    """Stands for the agent channel in a loop without an agent: it never requests a stop and drops all reports."""

    def stop_wanted(self) -> bool:
        return False

    def send(self, report: Report) -> None:
        pass


def timed(step: Callable[[], object], count: int) -> TimeSample:
    """Return the time of one step, as the mean of `count` steps between two barriers. Processor seconds are summed over
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
