"""Finds the tensor in which a loss or a gradient first became NaN or infinite, after a step or a validation has failed.

The forward pass of the failed batch runs again with hooks on every module: in training mode with the same random
numbers after a training step, in evaluation mode after a validation. The report names the first non-finite
activation in the order of the model, over all ranks. If all activations are finite, the report names the first
non-finite gradient of the backward pass.
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
    """An activation or a gradient in which `bad` of the `values` numbers are NaN or infinite."""

    order: tuple[int, int, int]
    """Position in the model, by which tensors are sorted. For an activation: (stage, number of the module in the
    order of execution, 0 for the module's input or 1 for its output). For a gradient: (stage, number of the
    parameter in the stage, 0)."""
    rank: int
    """Rank on which the tensor is."""
    module: str
    """Name of the module in the whole model."""
    what: str
    """Kind of tensor: 'forward output', 'forward input' or 'gradient of weight'."""
    bad: int
    values: int
    bad_weights: int
    """Number of non-finite values in the module's own parameters; for a gradient, in its parameter alone."""
    weights: int
    """Number of all values in the parameters that `bad_weights` counts."""
    largest_weight: float
    """The largest absolute value among the finite ones of the same parameters."""


def diagnose(trainer: Trainer, step: int, batch: SampleBatch, norm: float, *, training: bool) -> str:
    """Return a line that says which value is not finite, in which tensor it began and what may help. Collective over
    all ranks.

    Args:
        step: number of the step that failed, counted from 1.
        batch: this replica's part of the batch that failed.
        norm: norm of the whole model's gradient; after a validation, the validation's loss, which is not finite. The
            same on every rank.
        training: True after a training step, False after a validation.
    """
    with ACTIVITY.doing("diagnosis of a value that is no number", waits="world"):
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
    """Return one line for the user: step, rank, device, the first non-finite tensor and what may help. If `tensor` is
    None, the line has no rank and device, and says that the error cannot be found again.

    Args:
        loss: the loss of the batch.
        norm: norm of the gradient, which the line names if the loss is finite.
        tensor: the first non-finite tensor; None if the diagnosis found none.
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
    """Run the forward pass again. Return (this replica's share of the global batch's mean loss, the first non-finite
    activation on this rank); the activation is None if all are finite.
    """
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
    """Return this rank's non-finite gradient that is nearest to the loss, because the backward pass reached it
    first; None if all gradients are finite."""
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
    """Return (number of non-finite values, number of all values, largest finite absolute value) of the parameters;
    of a DTensor, this rank's part counts."""
    tensors = [local_part(parameter.detach()) for parameter in parameters]
    largest = max(
        (float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor in tensors if tensor.numel()), default=0.0
    )
    return (*_not_finite(tensors), largest)


def _not_finite(tensors: Sequence[object], masks: bool = False) -> tuple[int, int]:
    """Return (number of non-finite values, number of all values) of the floating-point tensors in `tensors`, whose
    other items are skipped. Of a DTensor, only this rank's part counts.

    Args:
        masks: whether -inf counts as finite: modules without weights may pass on attention masks and masked scores.
    """
    bad = values = 0
    for item in tensors:
        if isinstance(item, Tensor) and item.is_floating_point():
            tensor = local_part(item)
            fine = tensor.isfinite() | tensor.isneginf() if masks else tensor.isfinite()
            bad += int(tensor.numel() - fine.sum())
            values += tensor.numel()
    return bad, values
