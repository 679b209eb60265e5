"""The L2 norm of the whole model's gradient, clipping by this norm, and the gradients of weights that several stages
hold.

torch's own functions refuse the mix of DTensors and plain tensors that a tensor-parallel stage has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from hpctrain.checkpoint.memory.update import clip_factor
from hpctrain.records.plan.plan import Plan


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the part of each parameter's gradient that this rank holds, as plain tensors that share memory with the
    gradients.

    A missing gradient becomes zeros. Autograd may leave a DTensor's gradient whole although the parameter is split (as
    for the embedding), or as partial sums although the parameter is not split (as for norms with sequence parallelism).
    Such a gradient first gets the parameter's own placements, by collectives over tp. Without that, norm and optimizer
    would see a wrong shape or a partial sum.
    """
    parameters = list(parameters)
    _sum_parts(parameters)
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        gradients.append(local_part(grad))
    return gradients


def _sum_parts(parameters: list[nn.Parameter]) -> None:
    """Sum over tp the gradients that are partial sums although their parameters are not split; one collective for all
    of them.
    """
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
    """Return the number of parts that a parameter is split into; 1: every rank of its mesh holds the whole
    parameter.
    """
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())


def gradient_norm(
    parameters: list[nn.Parameter],
    plan: Plan,
    tied_holders: Mapping[nn.Parameter, int] | None = None,
    together: bool = False,
) -> Tensor:
    """Return the L2 norm of the whole model's gradient, after the reduction over replicas. Collective over the world.

    The result is a number in double precision on the parameters' device: on a GPU nothing here waits for it.

    A gradient is held by all replicas and tp ranks of a stage, or split over some of them. So its squared norm is
    divided by the number of holders before the sum over all ranks. With local SGD, the result is the root mean square
    of the replicas' norms.

    Args:
        parameters: this rank's parameters.
        plan: the plan, which gives the number of holders.
        tied_holders: parameter -> number of pipeline ranks that hold it, for parameters with more than one; None: every
            parameter has one.
        together: whether no rank may have the norm before all ranks have called this function.
    """
    gradients = local_gradients(parameters)
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for parameter, grad in zip(parameters, gradients, strict=True):
        holders = plan.dp * plan.tp // _shards(parameter) * (tied_holders or {}).get(parameter, 1)
        total += _square(grad.detach()) / holders
    if plan.world_size == plan.dp and plan.shards == 1 and plan.codec.sums_gradients:
        total *= plan.dp  # every rank holds the whole gradient, so no sum is needed
        if together:
            dist.barrier()
    else:
        dist.all_reduce(total)
    return total.sqrt()


def finite_everywhere(gradients: list[Tensor]) -> bool:
    """Return whether all gradients of all ranks are finite. Collective over the world."""
    non_finite = sum(gradient.isfinite().logical_not().any() for gradient in gradients)
    total = torch.as_tensor(non_finite).to(gradients[0].device, torch.float32)
    dist.all_reduce(total)
    return float(total) == 0.0


def _square(grad: Tensor) -> Tensor:
    """Return the square of a tensor's norm, in double precision.

    The sum over a row is in fp32, the sum over rows in double. The relative error is 1e-10. A copy of the tensor in
    double would be no more useful and take ten times as long. A sum in fp32 over a whole matrix of 20 million numbers
    has a relative error of 2e-3.
    """
    rows = torch.linalg.vector_norm(grad, dim=-1) if grad.dim() > 1 else grad
    return rows.double().pow(2).sum()


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale this rank's gradients so that the norm of the whole model's gradient, which is `norm` now, becomes at most
    `largest`.

    On a GPU nothing here waits for the norm. If the norm is NaN, the gradients stay as they are, so that the first
    non-finite gradient can be found.
    """
    if norm.device.type == "cuda" or norm > largest:
        torch._foreach_mul_(local_gradients(parameters), clip_factor(norm, largest))


class TiedWeights:
    """This rank's copies of shared weights, which are weights that several stages use; most models have none.

    Each stage uses its own copy, and the gradients of the copies are summed. A tied embedding is held by the first
    stage, which looks tokens up, and by the last one, whose head it is. In an encoder-decoder, the stage with the first
    decoder block looks tokens up too, and every stage holds the relative positions of its blocks. Copies on different
    ranks take the same optimizer step. Among copies on one rank, only the first has optimizer state; the others (the
    followers) are copied from the first.
    """

    def __init__(self, held: Mapping[str, list[nn.Module]], groups: Mapping[str, dist.ProcessGroup | None]) -> None:
        self._held = held
        """Parameter name -> this rank's stages with a copy, in the model's order."""
        self._groups = groups
        """Parameter name -> the process group of the ranks with a copy; None if this rank has all copies."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return this rank's copies of a shared weight, in the model's order.

        They are looked up in each call, because sharding replaces parameters.
        """
        return [module.get_parameter(name) for module in self._held[name]]

    @property
    def followers(self) -> list[nn.Parameter]:
        """Return this rank's copies without optimizer state (the followers): for each shared weight, all copies on this
        rank but the first one on this rank."""
        return [copy for name in self._held for copy in self.parameters(name)[1:]]

    @property
    def leaders(self) -> list[nn.Parameter]:
        """Return this rank's copies to whose gradients `add_local_gradients` adds those of followers."""
        return [copies[0] for name in self._held if len(copies := self.parameters(name)) > 1]

    def holders(self) -> dict[nn.Parameter, int]:
        """Return this rank's first copy of each shared weight that several pipeline ranks hold -> the number of these
        ranks.
        """
        groups = {name: group for name, group in self._groups.items() if group is not None}
        return {self.parameters(name)[0]: dist.get_world_size(group) for name, group in groups.items()}

    @torch.no_grad()
    def update_followers(self) -> None:
        """Copy the first copy of each shared weight on this rank into the other copies on this rank (the followers).
        Call this function before each training or validation step."""
        for name in self._held:
            first, *others = self.parameters(name)
            for other in others:
                local_part(other).copy_(local_part(first))

    def add_local_gradients(self) -> None:
        """Add the gradients of the other copies of each shared weight on this rank to the gradient of the first copy,
        and set the others to None. Call it after the backward passes of a step."""
        for name in self._held:
            first, *others = self.parameters(name)
            if not others:
                continue
            total, *gradients = local_gradients([first, *others])
            for gradient in gradients:
                total += gradient
            for other in others:
                other.grad = None

    def all_reduce_gradients(self) -> int:
        """Sum the gradient of each shared weight over the ranks with a copy of the weight. Collective over these ranks.

        Call it after the reduction over replicas. The rounding of that reduction depends on a value's position in a
        message, which differs between stages. The messages over the copies have equal layouts on all ranks, so their
        sums, computed last, are equal bit by bit.

        Returns:
            Bytes that this rank sent.
        """
        sent = 0
        for name, group in self._groups.items():
            if group is None:
                continue
            (gradient,) = local_gradients(self.parameters(name)[:1])
            dist.all_reduce(gradient, group=group)
            count = dist.get_world_size(group)
            sent += 2 * (count - 1) * gradient.numel() * gradient.element_size() // count  # bytes of a ring all-reduce
        return sent


def tie_weights(
    plan: Plan,
    rank: int,
    shared: Mapping[str, list[int]],
    held: Mapping[int, nn.Module],
    timeout: timedelta | None = None,
) -> TiedWeights:
    """Return this rank's copies of shared weights, joined with the other ranks' copies. Collective over the world.

    Args:
        plan: the plan.
        rank: this rank.
        shared: parameter name -> numbers of the stages with a copy, ascending.
        held: stage number -> stage, for the stages that this rank holds.
        timeout: how long one rank waits for the others in a sum; None: torch's default, half an hour with gloo and ten
            minutes with NCCL.
    """
    owner = plan.stage_owner()
    mesh = plan.mesh()
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    groups: dict[str, dist.ProcessGroup | None] = {}
    here: dict[str, list[nn.Module]] = {}
    for name, stages in shared.items():
        modules = [held[stage] for stage in stages if stage in held]
        if modules:
            here[name], groups[name] = modules, None
        owners = sorted({owner[stage] for stage in stages})
        if len(owners) == 1:
            continue
        # Ranks along tp are in ascending order, as in build_mesh.
        columns = [[member for row in mesh[pp] for member in sorted(row)] for pp in owners]
        for members in zip(*columns, strict=True):
            key = tuple(sorted(members))
            if key not in made:
                made[key] = dist.new_group(list(key), timeout=timeout)
            if rank in key:
                groups[name] = made[key]
    return TiedWeights(here, groups)
