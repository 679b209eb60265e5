"""A pipeline stage whose state is sharded over replicas: when its weights are gathered and its gradients summed."""

from __future__ import annotations

from typing import Any

from torch import nn

from hpctrain.compress.build import build_reduce_scatters
from hpctrain.compress.collectives.reduce_scatter import Residuals, residuals_of
from hpctrain.parallel.fsdp import (
    finish_backward,
    flat_gradient_layouts,
    shard_group,
    sharded_parts,
    track_collectives,
)
from hpctrain.parallel.stage import InstrumentedStage
from hpctrain.records.plan.compression import NO_COMPRESSION_CODEC
from hpctrain.records.plan.plan import Plan


class ShardedStage(InstrumentedStage):
    """A stage after `apply_sharding`, for ZeRO levels 1 to 3.

    Level 1: gradients add up over the micro-batches and are summed over replicas once, at the end of the step. Level 2:
    gradients are summed in every micro-batch's backward pass, block by block. Level 3: weights too are gathered block
    by block, in forward and backward. A backward pass in two actions (I and W) does not run torch's hooks. At levels 2
    and 3 the stage's gradients are then summed after W, and at level 3 its weights are gathered whole for I and again
    for W.

    torch's own stage defers all gradients to the end and keeps the weights until then, which is level 1.
    """

    def __init__(self, *args: Any, plan: Plan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._zero = plan.zero
        self._sums_replicate_axis = True
        # torch disables a sharded module's hooks before each backward pass; it does not recognise one inside a list.
        self._plain = nn.ModuleList([self.submod])
        spec = NO_COMPRESSION_CODEC if plan.codec_reduces_replicate_axis else plan.compression[0]
        parts, group = flat_gradient_layouts(self.submod), shard_group(self.submod)
        self.reduce_scatters = build_reduce_scatters(spec, parts, group, self.device.type)
        """By part, the reduce-scatter over the replicas that share the state; None: torch's own."""
        replicate_degree = 1 if plan.codec_reduces_replicate_axis else plan.dp // plan.shards
        track_collectives(
            self.submod,
            self.stage_index,
            self._count_shared,
            replicate_degree,
            lambda: self._sums_replicate_axis,
            self.reduce_scatters,
        )

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        whole = backward_type == "full"
        if self._zero == 3 and not whole:
            self._gather()
        self._order(sums=self._zero > 1 and whole, frees=self._zero == 3 and whole, last=last_backward)
        result = self._backward(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            self._order(sums=self._zero > 1, frees=False, last=last_backward)
            finish_backward(self.submod)
        if self._zero == 3 and not whole:
            self._free()
        return result

    @property
    def residuals(self) -> Residuals | None:
        """Residuals of the stage's reduce-scatters; None if the codec has none."""
        return residuals_of(self.reduce_scatters)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients over replicas at the end of the step, at level 1; the other levels have already summed
        them.
        """
        if self._zero == 1:
            super().perform_reduce_grad(grad_scale_factor)

    def _backward(self, backward_type: str, bwd_kwargs: Any, last_backward: bool) -> Any:
        sharded, self.submod = self.submod, self._plain
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        finally:
            self.submod = sharded

    def _order(self, sums: bool, frees: bool, last: bool) -> None:
        """Set what the hooks of the next backward pass do: sum gradients over replicas, and free weights after use.

        Gradients are summed over the replicate axis in the last micro-batch only, which saves traffic between shard
        groups.
        """
        module: Any = self.submod
        module.set_requires_gradient_sync(sums)
        module.set_reshard_after_backward(frees)
        module.set_is_last_backward(last and self._zero > 1)
        self._sums_replicate_axis = last or self._zero == 1
        module.set_requires_all_reduce(self._sums_replicate_axis)

    def _gather(self) -> None:
        for part in sharded_parts(self.submod):
            part.unshard()

    def _free(self) -> None:
        for part in sharded_parts(self.submod):
            part.reshard()

    def _count_shared(self, sent: int) -> None:
        self.counters.sharding_bytes += sent
