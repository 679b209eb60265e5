"""The norm of the whole gradient over a mesh, and clipping by it. Written by hand because a stage under tensor
parallelism mixes DTensors and plain tensors, which torch's own functions refuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from hpctrain.records.plan.compression import LocalSteps
from hpctrain.records.plan.plan import Plan


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The part of each gradient that this rank holds, as plain tensors that share memory with the gradients.

    Autograd may leave a DTensor's gradient whole where the parameter is split (the embedding's is), or as parts to be
    summed where it is not (those of norms with sequence parallelism are); it is brought to the parameter's own split
    first, else norm and optimizer would work on the wrong shape or on a part. Collective over tp where that is so.
    """
    parameters = list(parameters)
    _sum_parts(parameters)
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


def _sum_parts(parameters: list[nn.Parameter]) -> None:
    """Sum the parts of gradients of parameters that are not split, all of them in one collective."""
    parts: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[nn.Parameter]] = {}
    for parameter in parameters:
        if _shards(parameter) > 1 or not isinstance(grad := parameter.grad, DTensor):
            continue
        if any(placement.is_partial() for placement in grad.placements):
            parts.setdefault((grad.device_mesh, grad.placements), []).append(parameter)
    for (mesh, placements), members in parts.items():
        flat = torch.cat([grad.to_local().reshape(-1) for p in members if isinstance(grad := p.grad, DTensor)])
        copies = [Replicate()] * mesh.ndim
        whole = DTensor.from_local(flat, mesh, placements, run_check=False).redistribute(mesh, copies).to_local()
        for parameter, summed in zip(members, whole.split([p.numel() for p in members]), strict=True):
            parameter.grad = DTensor.from_local(summed.view(parameter.shape), mesh, copies, run_check=False)


def _shards(parameter: nn.Parameter) -> int:
    """Parts that a parameter is split into; 1: every rank of its mesh holds all of it."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())


def gradient_norm(
    parameters: list[nn.Parameter], plan: Plan, tied_holders: Mapping[nn.Parameter, int] | None = None
) -> float:
    """Norm of the gradient of the whole model, after the reduction over replicas. Collective over the world.

    A tensor is held by all replicas and tp ranks of its stage, or split over some of them: its square is divided by the
    number of holders before everything is summed. Of replicas that train on their own, it is the root of the mean
    square of their norms.

    Args:
        tied_holders: pipeline ranks that hold a parameter, where it is more than one.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter, grad in zip(parameters, local_gradients(parameters), strict=True):
        holders = plan.dp * plan.tp // _shards(parameter) * (tied_holders or {}).get(parameter, 1)
        total += _square(grad.detach()).cpu() / holders
    if plan.world_size == plan.dp and plan.shards == 1 and not isinstance(plan.codec, LocalSteps):
        total *= plan.dp  # every rank holds everything: nothing to ask the others
    else:
        dist.all_reduce(total)
    return float(total.sqrt())


def finite_everywhere(gradients: list[Tensor]) -> bool:
    """Whether every number of the gradients of every rank is one. Collective over the world."""
    non_finite = sum(gradient.isfinite().logical_not().any() for gradient in gradients)
    total = torch.as_tensor(non_finite).to(gradients[0].device, torch.float32)
    dist.all_reduce(total)
    return float(total) == 0.0


def _square(grad: Tensor) -> Tensor:
    """The square of a tensor's norm, in double precision.

    Row by row in fp32, the rows summed in double: as exact as a double copy of the whole (1e-10 where fp32 sums over a
    whole matrix of 20 M numbers are 2e-3 off) at a tenth of its time.
    """
    rows = torch.linalg.vector_norm(grad, dim=-1) if grad.dim() > 1 else grad
    return rows.double().pow(2).sum()


def clip_gradients(parameters: list[nn.Parameter], norm: float, largest: float) -> None:
    """Scale all gradients so that the norm is at most `largest`."""
    if norm > largest:
        torch._foreach_mul_(local_gradients(parameters), largest / (norm + 1e-6))
