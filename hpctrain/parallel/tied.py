"""A tied matrix in a cut model: the first stage looks tokens up in it, the last one uses it as its head.

Each end holds a copy, and every use adds to the same gradient: the copies' gradients are summed. On two ranks, both
copies then take the same step. On one rank, the last stage's copy follows the first stage's, which alone has a state.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.parallel.gradients import local_gradients
from hpctrain.records.plan import Plan

NAME = "embedding.weight"


class TiedEnds:
    """The copies of the tied matrix that this rank holds, at the first and at the last stage."""

    def __init__(self, first: nn.Module | None, last: nn.Module | None, group: dist.ProcessGroup | None) -> None:
        self._modules = [module for module in (first, last) if module is not None]
        self._group = group
        """This rank and the one at the other end; None where both ends are here."""

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters themselves, asked for anew because sharding replaces them."""
        return [module.get_parameter(NAME) for module in self._modules]

    @property
    def follower(self) -> nn.Parameter | None:
        """The copy that has no state of its own."""
        return self.copies[1] if len(self._modules) == 2 else None

    def holders(self) -> dict[nn.Parameter, int]:
        """Pipeline ranks that hold the parameter, where it is more than one."""
        return dict.fromkeys(self.copies, 2) if self._group is not None else {}

    @torch.no_grad()
    def follow(self) -> None:
        """Before a step: bring the last stage's copy up to date where both ends are here."""
        if len(self._modules) == 2:
            source, target = self.copies
            _local(target).copy_(_local(source))

    def add_here(self) -> None:
        """After the backward passes: where both ends are here, one gradient for both uses."""
        if len(self._modules) == 2:
            source, target = self.copies
            mine, other = local_gradients([source, target])
            mine += other
            target.grad = None

    def sum_gradients(self) -> int:
        """After the reduction over replicas: add the other end's gradient. Collective over the two ends.

        Not before it: the order in which a reduction adds depends on where in a message a value stands, which differs
        between the ends. A sum of two is the same on both, bit by bit.

        Returns:
            Bytes this rank put on the wire.
        """
        if self._group is None:
            return 0
        (mine,) = local_gradients(self.copies)
        dist.all_reduce(mine, group=self._group)
        # A ring all-reduce of two sends every byte once from each.
        return mine.numel() * mine.element_size()


def tie_ends(
    plan: Plan, rank: int, first: nn.Module | None, last: nn.Module | None, timeout: timedelta | None = None
) -> TiedEnds | None:
    """Join the ends of a cut model with a tied matrix. Collective over the world: every rank calls it.

    Args:
        first, last: the stages at the ends that this rank holds; one module of one stage is tied in itself.
        timeout: how long one end waits for the other; None: torch's own time, half an hour with gloo and ten minutes
            with NCCL.

    Returns:
        None on ranks that hold no end.
    """
    owner = plan.stage_owner()
    ends = owner[0], owner[len(plan.stages) - 1]
    group = None
    if ends[0] != ends[1]:
        mesh = plan.mesh()
        # Along tp in ascending order, as in build_mesh.
        columns = [[member for row in mesh[pp] for member in sorted(row)] for pp in ends]
        for pair in zip(*columns, strict=True):
            made = dist.new_group(sorted(pair), timeout=timeout)
            group = made if rank in pair else group
    return TiedEnds(first, last, group) if first is not None or last is not None else None


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
