"""The norm of the whole gradient over a mesh, and clipping by it. Written by hand because a stage under tensor
parallelism mixes DTensors and plain tensors, which torch's own functions refuse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.records.plan import Plan


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The part of each gradient that this rank holds, as plain tensors that share memory with the gradients.

    Autograd may leave a DTensor's gradient whole where the parameter is split (the embedding's is); it is brought to
    the parameter's own split first, else norm and optimizer would work on the wrong shape.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            if grad.placements != parameter.placements:
                grad = grad.redistribute(parameter.device_mesh, parameter.placements)
                parameter.grad = grad
            grad = grad.to_local()
        gradients.append(grad)
    return gradients


def gradient_norm(parameters: list[nn.Parameter], plan: Plan) -> float:
    """Norm of the gradient of the whole model, after the reduction over replicas. Collective over the world.

    Each tensor is held by all replicas, and a tensor that is not split also by all tp ranks: its square is divided by
    the number of holders before everything is summed.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter, grad in zip(parameters, local_gradients(parameters), strict=True):
        # The bias of a linear that is split by rows is a DTensor, and whole on each of them.
        split = isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)
        holders = plan.dp if split else plan.dp * plan.tp
        total += grad.detach().double().pow(2).sum().cpu() / holders
    dist.all_reduce(total)
    return float(total.sqrt())


def clip_gradients(parameters: list[nn.Parameter], norm: float, largest: float) -> None:
    """Scale all gradients so that the norm is at most `largest`."""
    if norm > largest:
        torch._foreach_mul_(local_gradients(parameters), largest / (norm + 1e-6))
