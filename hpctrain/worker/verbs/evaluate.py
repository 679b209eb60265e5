"""`python -m hpctrain.worker eval`: the loss of a run's model on given corpora, whatever plan saved its checkpoint.

The processes compute the loss as those of a run compute the validation loss: by a plan. Its replicas share the
sequences, and each replica may be cut into pipeline stages.

The request is JSON on the command line, the reply is JSON on stdout: {"sets": …} or {"error": …}.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.atomic import write_text
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.system.kernel import die_with_parent
from hpctrain.base.units import format_bytes
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.corpus.read.tokens import Corpus, Split
from hpctrain.launch.small_run import make_plan
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.probe.system.host import usable_memory_bytes
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.objective import lengths
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.code_copy import CODE_FOLDER, import_code_first
from hpctrain.schedule.resolve import schedule_of
from hpctrain.worker.batch_loader import BatchLoader, SampleBatch
from hpctrain.worker.build import AUTOCAST
from hpctrain.worker.forked_ranks import run_forked
from hpctrain.worker.verbs.json_reply import json_reply
from hpctrain.worker.weights import fill_of

BATCH_TOKENS = 4096
"""Most tokens of a micro-batch, unless one sequence has more: enough to use a device fully, and few enough that the
logits take less memory than the weights."""
MICRO_BATCHES = 4
"""Micro-batches of a batch for each stage of a pipeline: with 4, stages wait a fifth of the time."""
PROGRESS_S = 1.0
"""Pause in seconds between two reports of the progress."""
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for another one in one operation. A process that ended is noticed at once by its parent."""


@dataclass(frozen=True)
class EvaluateRequest:
    """A request to evaluate a model: which one, on which data, and in how many processes."""

    folder: str
    """The run folder."""
    checkpoint: str | None
    """Path of a verified checkpoint folder; None: the model before training."""
    data: list[str]
    """Corpus folders; each is evaluated separately."""
    split: Split
    """The part of each corpus that is evaluated: train, valid or all."""
    samples: int | None
    """Largest number of sequences of each corpus; None means all."""
    processes: int = 1
    """Number of processes, a multiple of `pp`."""
    pp: int = 1
    """Number of pipeline stages into which each replica of the model is cut."""
    progress: str | None = None
    """File to which 'DONE TOTAL' is written, at most once a second: the numbers of sequences of all corpora; None: to
    no file."""


def main(argv: list[str]) -> int:
    """Evaluate the model that the request names. Return 0, or the exit code of an error that the reply describes."""
    die_with_parent(os.getppid())
    question = EvaluateRequest(**json.loads(argv[0]))
    import_code_first(Path(question.folder) / CODE_FOLDER)
    return json_reply(lambda: {"sets": evaluate(question)})


def evaluate(question: EvaluateRequest) -> list[dict[str, Any]]:
    """Return for each corpus, in the order of the request, {"loss": mean loss of a target, "samples": number of
    sequences, "targets": number of targets}.

    Raises:
        InputError: data is missing, too small or damaged, the initial weights cannot be made, or there are too few GPUs
            or too little memory.
        CheckpointError: the checkpoint cannot be loaded.
        HpctrainError: a loss is not finite, or a process failed. With several processes, also where the checkpoint
            cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-eval-") as meeting:
        less_memory = "use fewer processes, or a larger --pp"
        return run_forked(question.processes, lambda rank: _evaluate_on(rank, question, Path(meeting)), less_memory)[0]


def _evaluate_on(rank: int, question: EvaluateRequest, meeting: Path) -> list[dict[str, Any]]:
    """Return the result of `evaluate`, as process `rank`. Collective over all processes.

    Args:
        meeting: an empty folder in which the processes find each other.
    """
    run = run_of(Path(question.folder))
    device = _device(rank, run, question.processes)
    if device.type == "cpu" and rank == 0:
        _check_memory(run, question)
    objective, seq_len = run.effective_objective(), run.data.seq_len
    special = special_tokens(run.data.train_folders, objective, seq_len)
    length = lengths(objective, seq_len).raw
    corpora = [Corpus.open([path], question.split, length, "DATA") for path in question.data]
    counts = [min(question.samples or corpus.windows, corpus.windows) for corpus in corpora]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(meeting / "store"), question.processes), rank=rank, world_size=question.processes,
        timeout=TIMEOUT, device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    plan = _plan(question, run, max(counts))
    pipeline = _pipeline(plan, run, rank, question, device)
    loaders = [BatchLoader(corpus, objective, special, seq_len, device) for corpus in corpora]
    report = _reporter(question.progress if rank == 0 else None, sum(counts))
    shares = [0.0 for _ in loaders]
    for number, (loader, samples) in enumerate(zip(loaders, counts, strict=True)):
        for start in range(0, samples, plan.sequences):
            report(sum(counts[:number]) + start)
            shares[number] += pipeline.evaluate(*_rows(loader, plan, rank, start, samples))
    totals = torch.tensor(shares, dtype=torch.float64)
    dist.all_reduce(totals)
    dist.barrier()
    dist.destroy_process_group()
    targets = lengths(objective, seq_len).targets
    return [
        _judged(total * plan.sequences, samples, targets)
        for total, samples in zip(totals.tolist(), counts, strict=True)
    ]


def _reporter(file: str | None, total: int) -> Callable[[int], None]:
    """Return a function that writes how many of `total` sequences are done to a file, if the last time was long ago."""
    written = -math.inf

    def report(done: int) -> None:
        nonlocal written
        if file is not None and time.monotonic() >= written + PROGRESS_S:
            written = time.monotonic()
            write_text(Path(file), f"{done} {total}")

    return report


def _judged(total: float, samples: int, targets: int) -> dict[str, Any]:
    """Return the result for one corpus.

    Args:
        total: sum over all sequences of the mean loss of a sequence's targets.
        samples: number of sequences.
        targets: targets of a sequence.
    """
    if not math.isfinite(total):
        raise HpctrainError(f"the loss is {total}: this checkpoint is of no use; try an earlier one with --step")
    return {"loss": total / samples, "samples": samples, "targets": samples * targets}


def _device(rank: int, run: Run, processes: int) -> torch.device:
    if run.cluster.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if processes > gpus:
        raise InputError(f"--processes {processes}: this process may use {gpus} GPUs; allowed: up to one process a GPU")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _check_memory(run: Run, question: EvaluateRequest) -> None:
    """Check that the weights of all replicas fit into the memory of this machine.

    Raises:
        InputError: they do not.
    """
    dp, room = question.processes // question.pp, usable_memory_bytes()
    size = dp * run.spec().parameters() * 4
    if size > room:
        raise InputError(
            f"--processes {question.processes} --pp {question.pp}: {dp} copies of the weights take "
            f"{format_bytes(size)}, {format_bytes(room)} are free; use fewer processes, a larger --pp, or more memory"
        )


def _plan(question: EvaluateRequest, run: Run, samples: int) -> Plan:
    """Return the plan: replicas of equal size with equal stages, and micro-batches that are no larger than the largest
    corpus needs.

    Args:
        samples: sequences of the largest corpus.
    """
    dp = question.processes // question.pp
    micro_batches = 1 if question.pp == 1 else MICRO_BATCHES * question.pp
    rows = min(max(1, BATCH_TOKENS // run.data.seq_len), -(-samples // (dp * micro_batches)))
    return make_plan(question.pp, dp, run.spec().layers, rows, micro_batches)


def _pipeline(plan: Plan, run: Run, rank: int, question: EvaluateRequest, device: torch.device) -> Pipeline:
    coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, device.type, TIMEOUT)
    checkpoint = None if question.checkpoint is None else Path(question.checkpoint)
    inputs = PipelineInputs(
        plan, run.spec(), schedule_of(plan, coordinate.dp)[0], run.data.seq_len, run.seed, device,
        AUTOCAST[run.precision], timeout=TIMEOUT, objective=run.effective_objective(), fill=fill_of(run, checkpoint),
    )  # fmt: skip
    return build_pipeline(inputs, mesh, coordinate)


def _rows(loader: BatchLoader, plan: Plan, rank: int, start: int, samples: int) -> SampleBatch:
    """Return this replica's sequences of the batch that begins with sequence `start`, in the order that a validation
    uses. Sequences from number `samples` on only fill the batch, and have no targets."""
    count = plan.replicas[0].sequences
    first = start + Coordinate.of(plan, rank).dp * count
    batch = loader.batch(0, first, count)
    batch.targets[max(0, samples - first) :] = -100
    return batch
