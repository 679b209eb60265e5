"""Weights that several stages hold: each stage uses its own copy, and the gradients of the copies are summed.

A tied embedding is held by the first stage, which looks tokens up, and by the last one, whose head it is. In an
encoder-decoder the stage with the first decoder block looks tokens up too, and every stage holds the relative positions
of its blocks. Copies on different ranks take the same optimizer step. Among copies on one rank, only the first has
optimizer state; the others (the followers) are copied from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.parallel.gradients import local_gradients, local_part
from hpctrain.records.plan.plan import Plan


class TiedWeights:
    """The copies of shared weights that this rank holds; for most models there are none."""

    def __init__(self, held: Mapping[str, list[nn.Module]], groups: Mapping[str, dist.ProcessGroup | None]) -> None:
        self._held = held
        """Parameter name -> this rank's stages with a copy, in the model's order."""
        self._groups = groups
        """Parameter name -> the group of ranks with a copy; None if this rank has all copies."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the copies on this rank. They are looked up in each call, because sharding replaces parameters."""
        return [module.get_parameter(name) for module in self._held[name]]

    @property
    def followers(self) -> list[nn.Parameter]:
        """Return the copies without optimizer state."""
        return [copy for name in self._held for copy in self.parameters(name)[1:]]

    def holders(self) -> dict[nn.Parameter, int]:
        """Return parameter -> number of pipeline ranks that hold it, for parameters with more than one."""
        groups = {name: group for name, group in self._groups.items() if group is not None}
        return {self.parameters(name)[0]: dist.get_world_size(group) for name, group in groups.items()}

    @torch.no_grad()
    def update_followers(self) -> None:
        """Copy the values of the first copy to the followers; call it before a step."""
        for name in self._held:
            first, *others = self.parameters(name)
            for other in others:
                local_part(other).copy_(local_part(first))

    def add_local_gradients(self) -> None:
        """Add the followers' gradients to that of the first copy; call it after the backward passes of a step."""
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
        """Sum the gradients over the ranks with a copy, after the reduction over replicas. Collective over these ranks.

        The order of the two sums matters: the rounding of a reduction depends on a value's position in a message, which
        differs between stages. The messages of this sum have equal layouts on all ranks, so its results are equal bit
        by bit.

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
    """Join the copies of shared weights. Collective over the world: every rank calls it.

    Args:
        shared: parameter name -> stages with a copy, in order.
        held: stage number -> stage, for the stages that this rank holds.
        timeout: how long one rank waits for the others; None: torch's default, half an hour with gloo and ten minutes
            with NCCL.
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
