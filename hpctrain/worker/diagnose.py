"""Finds where a loss or a gradient first became NaN or infinite; it runs only after that has happened.

The forward pass of the failed micro-batches runs again with hooks on every module: in training mode with the same
random numbers after a training step, in evaluation mode after a validation. The report names the first non-finite
activation in the order of the model, over all ranks; if there is none, the first non-finite gradient of the backward
pass.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpctrain.base.activity import ACTIVITY
from hpctrain.parallel.gradients import local_part
from hpctrain.records.run.run import Run
from hpctrain.worker.batch_loader import SampleBatch
from hpctrain.worker.build import Trainer


@dataclass(frozen=True)
class NonFinite:
    """A tensor of `values` numbers, of which `bad` are not finite: NaN or infinite."""

    order: tuple[int, int, int]
    """Position in the model: (stage, module in the order of execution, 0 for its input or 1 for its output)."""
    rank: int
    module: str
    """Name of the module in the whole model."""
    what: str
    """Kind of tensor: 'forward output', 'forward input' or 'gradient of weight'."""
    bad: int
    values: int
    bad_weights: int
    """Number of non-finite values in the module's own parameters."""
    weights: int
    largest_weight: float
    """The largest absolute value of the finite weights."""


def diagnose(trainer: Trainer, step: int, batch: SampleBatch, norm: float, *, training: bool) -> str:
    """Return a line that says which value is not finite, where it began and what may help. Collective over all ranks.

    Args:
        step: number of the step that failed, counted from 1.
        batch: this replica's part of the step's batch.
        norm: norm of the gradient, the same on every rank.
        training: True after a training step, False after a validation.
    """
    with ACTIVITY.doing("diagnosis of a value that is no number", waits=True):
        share, forward = _forward(trainer, batch, training)
        of_rank = (share if trainer.coordinate.tp == 0 else 0.0, forward, _gradient(trainer))
        everyone: list[tuple[float, NonFinite | None, NonFinite | None]] = [of_rank] * trainer.plan.world_size
        dist.all_gather_object(everyone, of_rank)
    loss = sum(item[0] for item in everyone)
    first = min((item[1] for item in everyone if item[1]), key=lambda bad: (bad.order, bad.rank), default=None)
    last = max((item[2] for item in everyone if item[2]), key=lambda bad: (bad.order, -bad.rank), default=None)
    return diagnosis_line(step, loss, norm, first or last, trainer.plan.ranks, trainer.run)


def diagnosis_line(
    step: int, loss: float, norm: float, tensor: NonFinite | None, places: Sequence[str], run: Run
) -> str:
    """Return the line that the user reads.

    Args:
        tensor: the first non-finite tensor; None if the second forward pass shows none.
        places: the device of each rank.
    """
    wrong = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    if tensor is None:
        return (
            f"step {step}: {wrong}, and it cannot be found again: with the same weights and samples every activation "
            f"and gradient is a number now; go on from the last checkpoint, and suspect the hardware"
        )
    who = f"step {step}, rank {tensor.rank} ({places[tensor.rank]})"
    of = f"{tensor.what} has {tensor.bad} of {tensor.values} values not finite"
    weights = f"weights finite, the largest {tensor.largest_weight:.3g}"
    if tensor.bad_weights:
        weights = f"{tensor.bad_weights} of {tensor.weights} weights not finite"
    return f"{who}: {wrong}; first in {_place(tensor.module)}: {of}; {weights}. {_advice(run, tensor.bad_weights > 0)}"


def _place(module: str) -> str:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return f"layer {number[1]} ({module})" if number else module


def _advice(run: Run, weights_are_lost: bool) -> str:
    lower = f"lower optimizer.lr ({run.optimizer.lr:g} now)"
    if run.optimizer.clip_norm is None:
        lower += ", set optimizer.clip_norm"
    if run.precision != "fp32":
        lower += f", or set precision to fp32 ({run.precision} now)"
    if weights_are_lost:
        return f"An earlier step ruined the weights: go back to a checkpoint that is good and {lower}"
    return lower[0].upper() + lower[1:]


def _forward(trainer: Trainer, batch: SampleBatch, training: bool) -> tuple[float, NonFinite | None]:
    """Return this replica's share of the loss, and the first non-finite activation on this rank."""
    findings: list[NonFinite] = []
    pipeline = trainer.pipeline
    with _watched(trainer, findings), torch.compiler.set_stance("force_eager"):
        share = pipeline.replay_forward(*batch) if training else pipeline.evaluate(*batch)
    trainer.pipeline.take_counters()
    return share, min(findings, key=lambda bad: bad.order, default=None)


@contextlib.contextmanager
def _watched(trainer: Trainer, findings: list[NonFinite]) -> Iterator[None]:
    """Check the inputs and outputs of every module of this rank's stages; append non-finite ones to `findings`."""
    order: dict[tuple[int, str], int] = {}  # filled when a module's first call ends, so submodules come first

    def hook(stage: int, name: str) -> Callable[[nn.Module, object, object], None]:
        def check(module: nn.Module, inputs: object, output: object) -> None:
            masks = not any(True for _ in module.parameters(recurse=False))
            place = order.setdefault((stage, name), len(order))
            for side, (what, tensors) in enumerate((("forward input", inputs), ("forward output", output))):
                bad, values = _not_finite(tree_leaves(tensors), masks)
                if bad:
                    where = (stage, place, side), trainer.coordinate.rank, name
                    weights = _weights(module.parameters(recurse=False))
                    findings.append(NonFinite(*where, what, bad, values, *weights))
                    return

        return check

    handles = [
        module.register_forward_hook(hook(stage.stage_index, name or f"stage {stage.stage_index}"))
        for stage in trainer.pipeline.stages
        for name, module in stage.submod.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gradient(trainer: Trainer) -> NonFinite | None:
    """Return this rank's non-finite gradient nearest to the loss: the backward pass reached it first."""
    nearest = None
    for stage in trainer.pipeline.stages:
        for place, (name, parameter) in enumerate(stage.submod.named_parameters()):
            bad, values = _not_finite([parameter.grad] if parameter.grad is not None else [])
            if bad:
                module, _, leaf = name.rpartition(".")
                where = (stage.stage_index, place, 0), trainer.coordinate.rank, module
                nearest = NonFinite(*where, f"gradient of {leaf}", bad, values, *_weights([parameter]))
    return nearest


def _weights(parameters: Iterable[nn.Parameter]) -> tuple[int, int, float]:
    """Return the number of non-finite weights, the number of all weights, and the largest finite absolute value."""
    tensors = [local_part(parameter.detach()) for parameter in parameters]
    largest = max(
        (float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor in tensors if tensor.numel()), default=0.0
    )
    return (*_not_finite(tensors), largest)


def _not_finite(tensors: Sequence[object], masks: bool = False) -> tuple[int, int]:
    """Return the number of non-finite values and of all values; of a DTensor, only those of this rank's part.

    Args:
        masks: whether -inf is allowed: modules without weights may pass on masks and masked scores.
    """
    bad = values = 0
    for item in tensors:
        if isinstance(item, Tensor) and item.is_floating_point():
            tensor = local_part(item)
            fine = tensor.isfinite() | tensor.isneginf() if masks else tensor.isfinite()
            bad += int(tensor.numel() - fine.sum())
            values += tensor.numel()
    return bad, values
