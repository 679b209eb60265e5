"""Checks that train a small model (by a plan, in a precision, compiled, or while a checkpoint is written), and the
check of collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import format_bytes, format_si
from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.checkpoint.published import newest
from hpctrain.checkpoint.state import collect, fingerprint
from hpctrain.records.history.selfcheck import CheckOrder, CheckResult
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import run_of
from hpctrain.worker.build import Trainer
from hpctrain.worker.loop import Loop
from hpctrain.worker.standalone import open_loop

STEPS = 5
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-4}
"""Kind of device -> largest allowed relative difference of a loss in fp32 between two plans. Sums in another order
round differently; on a GPU, libraries also choose other kernels for other shapes."""
PRECISION_TOLERANCE = {"bf16": 0.02, "fp16": 0.005}
"""Precision -> largest allowed relative difference of a loss from fp32 after a few steps."""
SUM_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Kind of device -> bytes of the tensor that `check_all_reduce` sums."""
SUM_TIMES = 5
"""Number of all-reduces that are timed."""
PLAN_FILE = "given.json"


def check_reference(order: CheckOrder) -> CheckResult:
    """Train five steps in one process in fp32, and return the losses. They are the reference of the other checks.

    Raises:
        HpctrainError: the loss did not fall, or is not finite.
    """
    losses = _losses(order)
    if not losses[-1] < losses[0]:
        raise HpctrainError(f"the loss did not fall: {_words(losses)}")
    return CheckResult(figure=f"loss {_words(losses)}", expected="a falling loss", losses=losses)


def check_plan(order: CheckOrder) -> CheckResult:
    """Train by a plan, and return the losses. They must be those of one process, within `TOLERANCE`.

    Raises:
        HpctrainError: a loss is not finite, or differs by more.
    """
    return _compared(order, _losses(order), TOLERANCE[order.device], "one process")


def check_precision(order: CheckOrder) -> CheckResult:
    """Train in bf16 or fp16, and return the losses. They must be those of fp32, within `PRECISION_TOLERANCE`.

    Raises:
        HpctrainError: a loss is not finite, or differs by more.
    """
    precision = run_of(Path(order.folder)).precision
    return _compared(order, _losses(order), PRECISION_TOLERANCE[precision], "fp32")


def check_compiled(order: CheckOrder) -> CheckResult:
    """Train with blocks that torch.compile compiled, and return the losses. They must be those without compile, within
    ten times `TOLERANCE`.

    Raises:
        HpctrainError: a loss is not finite, or differs by more.
    """
    return _compared(order, _losses(order), 10 * TOLERANCE[order.device], "the same run without compile")


def check_checkpoint(order: CheckOrder) -> CheckResult:
    """Save a checkpoint while the next step changes the weights, then load it into the same trainer. The loaded
    weights must be the saved ones, bit by bit. Return the checkpoint's size and the time for which the next
    step waited for the copy.

    Raises:
        HpctrainError: the loaded weights differ, the step changed no weight, or the checkpoint cannot be written or
            loaded.
    """
    folder = Path(order.folder)
    with _trainer(order) as (trainer, loop):
        loop.one_step()
        saved = fingerprint(trainer.pipeline.parameters())
        start = time.perf_counter()
        loop.save()
        back_s = time.perf_counter() - start
        loop.one_step()
        loop.finish_saving(wait_for_room=False)
        later = fingerprint(trainer.pipeline.parameters())
        checkpoint, _ = newest(folder / "checkpoints", hashes=False)
        if checkpoint is None:
            raise HpctrainError("no checkpoint was written")
        state = collect(trainer.pipeline.parameters(), trainer.optimizer)
        CheckpointReader(checkpoint.path).load(state, dist.new_group(backend="gloo"))
        loaded = fingerprint(trainer.pipeline.parameters())
    if saved == later:
        raise HpctrainError("the step beside the save changed no weight")
    if loaded != saved:
        raise HpctrainError("the loaded weights are not those that were saved")
    size = sum(entry.size_bytes for entry in checkpoint.manifest.files)
    return CheckResult(
        figure=f"{format_bytes(size)} saved beside a step, which waited {1e3 * back_s:.0f} ms for the copy",
        expected="equal weights after loading",
    )


def check_all_reduce(order: CheckOrder) -> CheckResult:
    """Sum a tensor over all ranks, with NCCL on GPUs and gloo on CPUs. Return the tensor's bytes divided by the seconds
    of one all-reduce (the algorithm bandwidth of nccl-tests).

    Raises:
        HpctrainError: the sum is wrong.
    """
    device = torch.device(order.device, order.rank) if order.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(Path(order.folder) / "store"), order.world)
    dist.init_process_group(
        backend, store=store, rank=order.rank, world_size=order.world, timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    values = torch.full((SUM_BYTES[order.device] // 4,), float(order.rank + 1), device=device)
    dist.all_reduce(values)
    if not bool((values == order.world * (order.world + 1) / 2).all()):
        raise HpctrainError("the sum over the ranks is wrong")
    _finish(device)
    start = time.perf_counter()
    for _ in range(SUM_TIMES):
        dist.all_reduce(values)
    _finish(device)
    seconds = (time.perf_counter() - start) / SUM_TIMES
    dist.barrier()
    dist.destroy_process_group()
    speed = format_si(values.nbytes / seconds, "B/s")
    return CheckResult(figure=f"{backend}, {order.world} ranks: {speed} of a sum", expected="right sums")


@contextmanager
def _trainer(order: CheckOrder) -> Iterator[tuple[Trainer, Loop]]:
    """Join the process group of the plan in the check's folder, yield the trainer and its training loop, and leave
    the group."""
    torch.manual_seed(0)
    folder = Path(order.folder)
    trainer, loop = open_loop(order.rank, order.world, folder, Plan.read(folder / PLAN_FILE))
    yield trainer, loop
    dist.barrier()
    dist.destroy_process_group()


def _losses(order: CheckOrder) -> list[float]:
    with _trainer(order) as (_, loop):
        return [loop.one_step().loss for _ in range(STEPS)]


def _compared(order: CheckOrder, losses: list[float], tolerance: float, other: str) -> CheckResult:
    """Return the result of comparing the losses with the order's reference losses, step by step.

    Args:
        tolerance: largest allowed relative difference.
        other: name of the reference in the texts of the result.

    Raises:
        HpctrainError: a loss is not finite, or differs by more than the tolerance.
    """
    pairs = list(zip(losses, order.reference, strict=True))
    if not all(map(math.isfinite, losses)):
        raise HpctrainError(f"a loss is not finite: {_words(losses)}")
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    if error > tolerance:
        raise HpctrainError(f"losses {_words(losses)} differ from {other}'s {_words(order.reference)} by {error:.2g}")
    return CheckResult(figure=f"losses within {error:.1g} of {other}'s", expected=f"≤ {tolerance:g}", losses=losses)


def _words(losses: list[float]) -> str:
    return f"{losses[0]:.4f} → {losses[-1]:.4f}"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
