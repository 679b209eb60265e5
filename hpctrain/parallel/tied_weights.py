"""Weights that several stages of a cut model hold: each uses its own copy, and the copies' gradients are summed.

A tied matrix lies at both ends: the first stage looks tokens up in it, the last one uses it as its head. In an
encoder-decoder the first decoder block looks tokens up, too, and every stage has the relative positions of its blocks.
Of copies on several ranks each takes the same step. Of copies on one rank the others follow the first, which alone has
a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.parallel.gradients import local_gradients
from hpctrain.records.plan.plan import Plan


class TiedWeights:
    """The copies that this rank holds."""

    def __init__(self, held: Mapping[str, list[nn.Module]], groups: Mapping[str, dist.ProcessGroup | None]) -> None:
        self._held = held
        """By name, the stages with a copy, in the model's order."""
        self._groups = groups
        """By name, the ranks with a copy; None where this one has all of them."""

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters themselves, asked for anew because sharding replaces them."""
        return [module.get_parameter(name) for module in self._held[name]]

    @property
    def followers(self) -> list[nn.Parameter]:
        """The copies that have no state of their own."""
        return [copy for name in self._held for copy in self.parameters(name)[1:]]

    def holders(self) -> dict[nn.Parameter, int]:
        """Pipeline ranks that hold the parameter, where it is more than one."""
        groups = {name: group for name, group in self._groups.items() if group is not None}
        return {self.parameters(name)[0]: dist.get_world_size(group) for name, group in groups.items()}

    @torch.no_grad()
    def update_followers(self) -> None:
        """Before a step: bring the copies that follow another one up to date."""
        for name in self._held:
            first, *others = self.parameters(name)
            for other in others:
                _local(other).copy_(_local(first))

    def add_local_gradients(self) -> None:
        """After the backward passes: one gradient for all uses on this rank."""
        for name in self._held:
            first, *others = self.parameters(name)
            if not others:
                continue
            mine, *gradients = local_gradients([first, *others])
            for gradient in gradients:
                mine += gradient
            for other in others:
                other.grad = None

    def all_reduce_gradients(self) -> int:
        """After the reduction over replicas: add the gradients of the other ranks. Collective over those with a copy.

        Not before it: the order in which a reduction adds depends on where in a message a value stands, which differs
        between the stages. These messages are the same on all, and so is their sum, bit by bit.

        Returns:
            Bytes this rank put on the wire.
        """
        sent = 0
        for name, group in self._groups.items():
            if group is None:
                continue
            (mine,) = local_gradients(self.parameters(name)[:1])
            dist.all_reduce(mine, group=group)
            count = dist.get_world_size(group)
            sent += 2 * (count - 1) * mine.numel() * mine.element_size() // count  # of a ring
        return sent


def tie_weights(
    plan: Plan,
    rank: int,
    shared: Mapping[str, list[int]],
    held: Mapping[int, nn.Module],
    timeout: timedelta | None = None,
) -> TiedWeights | None:
    """Join the copies of shared weights. Collective over the world: every rank calls it.

    Args:
        shared: by name, the stages with a copy, in order.
        held: by number, the stages that this rank holds.
        timeout: how long one rank waits for the others; None: torch's own time, half an hour with gloo and ten minutes
            with NCCL.

    Returns:
        None on ranks that hold no copy.
    """
    owner = plan.stage_owner()
    mesh = plan.mesh()
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    groups: dict[str, dist.ProcessGroup | None] = {}
    here: dict[str, list[nn.Module]] = {}
    for name, stages in shared.items():
        own = [held[stage] for stage in stages if stage in held]
        if own:
            here[name], groups[name] = own, None
        owners = sorted({owner[stage] for stage in stages})
        if len(owners) == 1:
            continue
        # Along tp in ascending order, as in build_mesh.
        columns = [[member for row in mesh[pp] for member in sorted(row)] for pp in owners]
        for members in zip(*columns, strict=True):
            key = tuple(sorted(members))
            if key not in made:
                made[key] = dist.new_group(list(key), timeout=timeout)
            if rank in key:
                groups[name] = made[key]
    return TiedWeights(here, groups) if here else None


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
