"""Sharding of a stage's state over replicas with torch's `fully_shard`: ZeRO 1 to 3 (Rajbhandari et al. 2020), and
hybrid sharding, where several groups of replicas each hold the whole state (Zhao et al. 2023).

Only this file uses private names of torch's FSDP. It needs them for the default collectives, whose bytes it counts, and
for the callback that ends a backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.build import build_reduce_scatters
from hpctrain.compress.collectives.level_reduce_scatter import LevelGroups, scatters_by_level
from hpctrain.compress.collectives.reduce_scatter import (
    ReduceScatter,
    Residuals,
    ShardedParameter,
    residuals_of,
)
from hpctrain.compress.collectives.sums_in_flight import SumsInFlight
from hpctrain.model.imported.model import blocks_of
from hpctrain.parallel.mesh import reducer_sums_copies
from hpctrain.parallel.stage import InstrumentedStage
from hpctrain.parallel.tracked_work import TrackedWork
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.plan import Plan

CountBytes = Callable[[int], None]
"""Function that is called with the bytes that this rank sends for a collective."""


def apply_sharding(module: nn.Module, mesh: DeviceMesh, zero: int, compute: torch.dtype | None) -> None:
    """Shard the parameters of a plain or tensor-parallel stage in place: each block by itself, the other modules
    together.

    Gradients become sums over the replicas, never means; each parameter's `grad` holds this rank's shard.

    Args:
        mesh: what `sharding_mesh` returns: one axis over which to shard, or [replicate, shard].
        zero: ZeRO level. 1 and 2 keep the weights whole between forward and backward; 3 gathers them for each pass.
        compute: dtype in which weights are gathered and used, and in which the backward pass gives gradients. Gradients
            are summed in fp32, the optimizer's weights are fp32, and the residual stream stays fp32. Unlike with
            autocast alone, the embedding and the norms' weights are rounded too. None: fp32 throughout.
    """
    policy = (
        MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False) if compute else MixedPrecisionPolicy()
    )
    if compute and module.embedding is not None:
        module.embedding.register_forward_hook(_cast_to_fp32)  # type: ignore[union-attr]
    blocks = list(blocks_of(module).values())
    parts = [fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy) for part in blocks]
    root = fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    for part in [*parts, root]:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # Split logits are a view of a DTensor. torch warns about in-place writes to such an output; no code here does that.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    # By default FSDP prefetches the part that ran before, in any micro-batch. For the first block that may be the last
    # block, whose weights would stay in memory unused until the next micro-batch.
    for before, later in pairwise([root, *parts, root]):
        later.set_modules_to_backward_prefetch([before])


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the `fully_shard` modules of a stage: the stage itself and its blocks."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def flat_gradient_layouts(module: nn.Module) -> list[list[ShardedParameter]]:
    """Return, for each `fully_shard` module of a stage, the parameters in the module's flat gradient, in order.

    Each block is such a module. The stage itself is one too, with the parameters outside of blocks, of which there may
    be none.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [
        [
            ShardedParameter(names[member.sharded_param], member._orig_size, member.padded_sharded_param_size.numel())
            for gathered in _fsdp_param_groups_of(part)
            for member in gathered.fsdp_params
            if member.sharded_param.requires_grad
        ]
        for part in sharded_parts(module)
    ]


def padded_shards(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return sharded parameter -> flat memory that torch gathers, for the parameters of a stage. This rank's part of
    the parameter lies at the beginning of that memory; padding follows where the parts are not equal."""
    return {
        member.sharded_param: member._sharded_param_data
        for part in sharded_parts(module)
        for gathered in _fsdp_param_groups_of(part)
        for member in gathered.fsdp_params
    }


def shard_group(module: nn.Module) -> dist.ProcessGroup:
    """Return the process group of the ranks over which the state of a stage is sharded."""
    group: dist.ProcessGroup = next(
        gathered._reduce_scatter_process_group
        for part in sharded_parts(module)
        for gathered in _fsdp_param_groups_of(part)
    )
    return group


def _fsdp_param_groups_of(part: FSDPModule) -> list[Any]:
    """Return torch's records of the parameters that a `fully_shard` module gathers together; [] if it has none."""
    state: Any = fully_shard.state(part)  # type: ignore[attr-defined]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has at most one group for each module.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def finish_backward(module: nn.Module) -> None:
    """Run FSDP's callback at the end of a backward pass, after a backward pass that ran outside of FSDP's hooks.

    The callback sums the stage's gradients over the replicas, or adds them to those of earlier micro-batches if the sum
    over the replicas is due only after a later micro-batch.
    """
    fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def track_collectives(
    module: nn.Module,
    index: int,
    count: CountBytes,
    replicate_degree: int,
    sums_replicate_axis: Callable[[], bool],
    scatters: Sequence[ReduceScatter | None],
    in_flight: SumsInFlight | None,
    ended: Callable[[int], None] = lambda part: None,
) -> None:
    """Report the bytes of the stage's sharding collectives to `count` from now on.

    The collectives are also recorded in `ACTIVITY`, so that a diagnosis shows that this process waits for other
    replicas. The bytes of an all-gather, an all-reduce and torch's own reduce-scatter are those of the ring algorithm,
    the least that any algorithm sends.

    Args:
        module: the stage, after `apply_sharding`.
        index: number of the stage.
        count: called with the bytes that this rank sends for each collective.
        replicate_degree: number of groups of replicas that each hold the whole state.
        sums_replicate_axis: returns whether an all-reduce over the replicate axis follows the next reduce-scatter.
        scatters: for each `fully_shard` module, the reduce-scatter within a shard group; None: torch's own.
        in_flight: gets the sums that go on while the rank computes; None: the rank waits for each sum.
        ended: called with the number of a module, as soon as a sum that goes on has ended after which the sums over
            replicas that share the state are complete.
    """
    layouts = flat_gradient_layouts(module)
    for number, (part, pieces, scatter) in enumerate(zip(sharded_parts(module), layouts, scatters, strict=True)):
        part.set_custom_all_gather(_AllGather(count, f"gather weights of stage {index}"))
        operation = f"sum gradients of stage {index} over replicas"
        numbers = sum(piece.owned for piece in pieces)
        summing = _ReduceScatter(
            count, sums_replicate_axis, replicate_degree, scatter, operation, in_flight, numbers, partial(ended, number)
        )
        part.set_custom_reduce_scatter(summing)
        if replicate_degree > 1:
            part.set_all_reduce_hook(summing.finish_all_reduce)


def _cast_to_fp32(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output.float()


class _AllGather(DefaultAllGather):
    def __init__(self, count: CountBytes, operation: str) -> None:
        self._count = count
        self._operation = operation

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._count(output_tensor.nbytes - input_tensor.nbytes)
        with ACTIVITY.doing(self._operation, waits="dp"):
            work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        return None if work is None else TrackedWork([work], self._operation, waits="dp")


@dataclass(eq=False)
class _ReduceScatter(DefaultReduceScatter):
    """The reduce-scatter within a shard group, with its bytes counted. If there are several shard groups and
    `sums_replicate_axis` says so, torch's all-reduce between them follows at once, and `count` gets its bytes too.

    Args:
        count: called with the bytes that this rank sends.
        sums_replicate_axis: returns whether an all-reduce between shard groups follows the next reduce-scatter.
        replicate_degree: number of shard groups, each of which holds the whole state.
        scatter: the codec's reduce-scatter; None: torch's own.
        operation: text that `ACTIVITY` records meanwhile.
        in_flight: gets the sum if it can go on while the rank computes; None: the rank waits for each sum.
        numbers: count of numbers that each rank owns, padding included, if the gradient has all parameters.
        ended: called when such a sum has ended of which `sums_replicate_axis` said that it is the last one.
    """

    count: CountBytes
    sums_replicate_axis: Callable[[], bool]
    replicate_degree: int
    scatter: ReduceScatter | None
    operation: str
    in_flight: SumsInFlight | None
    numbers: int
    ended: Callable[[], None]

    def __post_init__(self) -> None:
        self._replicate_activity = ACTIVITY.doing(self.operation, waits="dp")

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        part, work = output_tensor.nbytes, None
        if self.in_flight is not None and self.scatter is not None:
            complete = output_tensor.numel() == self.numbers
            ended = self.ended if self.sums_replicate_axis() else None
            begun = self.in_flight.begin(
                self.scatter, output_tensor, input_tensor, group, self.operation, complete, ended
            )
            self.count(begun)
            return None
        all_reduced = self.replicate_degree > 1 and self.sums_replicate_axis()
        with ACTIVITY.doing(self.operation, waits="dp"):
            if self.scatter is None:
                self.count(input_tensor.nbytes - part)
                work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            else:
                self.count(self.scatter(output_tensor, input_tensor, group))
        if all_reduced:
            self.count(2 * (self.replicate_degree - 1) * part // self.replicate_degree)
            self._replicate_activity.__enter__()
        return work

    def finish_all_reduce(self, _sums: Tensor) -> None:
        """Record in `ACTIVITY` that the sum between shard groups has ended; torch calls this hook after the sum."""
        self._replicate_activity.__exit__(None)


class ShardedStage(InstrumentedStage):
    """A stage after `apply_sharding`, for ZeRO levels 1 to 3.

    Level 1: gradients add up over the micro-batches and are summed over replicas once, at the end of the step. Level 2:
    gradients are summed in every micro-batch's backward pass, block by block. Level 3: weights too are gathered block
    by block, in forward and backward. A backward pass in two actions (I and W) does not run torch's hooks. At levels 2
    and 3 the stage's gradients are then summed after W, and at level 3 its weights are gathered whole for I and again
    for W.

    torch's own pipeline stage would at every level defer all sums of gradients to the end of the step and keep the
    weights until then, which is level 1.
    """

    def __init__(self, *args: Any, plan: Plan, mesh: DeviceMesh, in_flight: SumsInFlight, **kwargs: Any) -> None:
        """Create the stage; other arguments go to `InstrumentedStage`.

        Args:
            plan: the plan.
            mesh: the plan's mesh.
            in_flight: gets the sums that go on while a rank with a CPU computes, of all stages of the rank.
        """
        super().__init__(*args, **kwargs)
        self._zero = plan.zero
        self._sums_replicate_axis = True
        # torch disables a sharded module's hooks before each backward pass; it does not recognise one inside a list.
        self._plain = nn.ModuleList([self.submod])
        self._in_flight = in_flight
        self.reduce_scatters = _reduce_scatters(self.submod, plan, mesh, self.device.type)
        """For each `fully_shard` module, the reduce-scatter over the replicas that share the state; None:
        torch's own.
        """
        replicate_degree = 1 if reducer_sums_copies(plan, self.device.type) else plan.dp // plan.shards
        track_collectives(
            self.submod,
            self.stage_index,
            self._count_shared,
            replicate_degree,
            lambda: self._sums_replicate_axis,
            self.reduce_scatters,
            in_flight if self.device.type == "cpu" else None,
            self._unit_complete,
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

    def backward_done(self) -> None:
        if self.observer is not None:
            self.observer.backward_done(self.stage_index)

    def parameters_of_units(self) -> list[list[nn.Parameter]]:
        parts = [
            [member.sharded_param for gathered in _fsdp_param_groups_of(part) for member in gathered.fsdp_params]
            for part in sharded_parts(self.submod)
        ]
        return parts[::-1]  # the stage itself comes last in a backward pass, and first among its modules

    def _unit_complete(self, part: int) -> None:
        """Tell the observer that the sums of module number `part` of `sharded_parts` have ended in the shard group."""
        if self.observer is not None:
            self.observer.gradients_complete(self.stage_index, len(self.reduce_scatters) - 1 - part)

    def _action_ended(self) -> None:
        self._in_flight.proceed()
        super()._action_ended()

    @property
    def residuals(self) -> Residuals | None:
        """Return the residuals of the stage's reduce-scatters; None if the codec has none."""
        return residuals_of(self.reduce_scatters)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients over replicas at the end of the step at ZeRO level 1; levels 2 and 3 have already summed
        them.

        Args:
            grad_scale_factor: number by which torch's method of this name divides the gradients.
        """
        if self._zero == 1:
            super().perform_reduce_grad(grad_scale_factor)
        else:
            self.backward_done()

    def _backward(self, backward_type: str, bwd_kwargs: Any, last_backward: bool) -> Any:
        sharded, self.submod = self.submod, self._plain
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        finally:
            self.submod = sharded

    def _order(self, sums: bool, frees: bool, last: bool) -> None:
        """Set what the hooks of the next backward pass do.

        Gradients are summed over the replicate axis in the last micro-batch only, which saves traffic between shard
        groups.

        Args:
            sums: whether to sum gradients over replicas; otherwise they are added to those of earlier micro-batches.
            frees: whether to free weights after use.
            last: whether the backward pass is the stage's last in the step.
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


def _reduce_scatters(module: nn.Module, plan: Plan, mesh: DeviceMesh, device_type: str) -> list[ReduceScatter | None]:
    """Return the reduce-scatter over the replicas that share a state, for each `fully_shard` module of a stage; None:
    torch's own."""
    parts, group = flat_gradient_layouts(module), shard_group(module)
    if reducer_sums_copies(plan, device_type):
        within = CodecSpec() if plan.intra_node == "flat" else plan.compression[0]
        return build_reduce_scatters(within, parts, group, device_type)
    if plan.level_replicas == 1:
        return build_reduce_scatters(plan.compression[-1], parts, group, device_type)
    groups = LevelGroups(mesh.get_group("shard"), mesh.get_group("replicate"))
    scatters = build_reduce_scatters(plan.compression[-1], parts, groups.between, device_type)
    return scatters_by_level(scatters, groups, torch.bfloat16 if plan.intra_node == "bf16" else None)
