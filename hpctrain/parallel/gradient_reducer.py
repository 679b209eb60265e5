"""Builds the reducer of a rank, which sums gradients over the replicas of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.build import build_reducer
from hpctrain.compress.collectives.level_reduce_scatter import take_level_bytes
from hpctrain.compress.collectives.reduce_scatter import LevelBytes, residual_metrics
from hpctrain.compress.reducers.levels import LevelReducer, NodeLevel, ReplicatedNodeLevel
from hpctrain.compress.reducers.outer_optimizer import OuterOptimizer
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.early_sums import Early, EarlyOrLate, EarlySums, when_sums_begin
from hpctrain.parallel.fsdp import ShardedStage
from hpctrain.parallel.gradients import local_part
from hpctrain.parallel.mesh import reducer_sums_copies
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.stage import InstrumentedStage
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.plan import Plan
from hpctrain.schedule.resolve import completion_order, schedule_of


def build_plan_reducer(plan: Plan, mesh: DeviceMesh, pipeline: Pipeline, early: Early = "faster") -> Reducer:
    """Return the reducer that sums the gradients of this rank's stages over replicas.

    Args:
        plan: the plan, which gives the codec and the sharding.
        mesh: the plan's mesh.
        pipeline: this rank's part of the pipeline; `reduce` gets the gradients in the order of its parameters.
        early: whether to begin with a stage's sums while the pipeline goes on, where the codec can do so. faster: as
            `when_sums_begin` says.
    """
    if plan.shards > 1 and not reducer_sums_copies(plan, pipeline.device.type):
        return ShardedReducer(pipeline.stages)
    reducer = _replica_reducer(plan, mesh, pipeline)
    usual = when_sums_begin(plan, pipeline.device.type)
    if early != "never" and usual != "never":
        pp = plan.stage_owner()[pipeline.stages[0].stage_index]
        order = completion_order(schedule_of(plan, 0)[0].ranks[pp])
        EarlySums(reducer, pipeline, order, EarlyOrLate() if early == usual == "faster" else None)
    return reducer


def _replica_reducer(plan: Plan, mesh: DeviceMesh, pipeline: Pipeline) -> Reducer:
    names = [name for name, _ in pipeline.parameters()]
    local = [local_part(parameter) for _, parameter in pipeline.parameters()]
    shapes = [part.shape for part in local]
    if plan.shards == plan.level_replicas == 1:
        group = mesh.get_group("dp")
        if isinstance(plan.codec, LocalSteps) and plan.dp > 1:
            return _local_sgd(plan, group, mesh.get_local_rank("dp"), local, plan.codec)
        return build_reducer(group, names, shapes, plan.compression[-1])
    group = mesh.get_group("replicate")
    if plan.shards > 1:
        within: NodeLevel = ShardedNodeLevel(pipeline.stages)
        if isinstance(plan.codec, LocalSteps):
            return LevelReducer(within, _local_sgd(plan, group, mesh.get_local_rank("replicate"), local, plan.codec))
    else:
        dtype = torch.bfloat16 if plan.intra_node == "bf16" else None
        within = ReplicatedNodeLevel(mesh.get_group("shard"), shapes, dtype)
        shapes = within.part_shapes
    return LevelReducer(within, build_reducer(group, names, shapes, plan.compression[-1]))


def _local_sgd(
    plan: Plan, group: dist.ProcessGroup, number: int, local: Sequence[Tensor], codec: LocalSteps
) -> LocalSgdReducer:
    """Return the reducer of local SGD.

    Args:
        plan: the plan.
        group: the replicas, or with hybrid sharding the shard groups.
        number: number of this replica, or of this shard group.
        local: this rank's parts of the parameters.
        codec: the settings of the outer optimizer.
    """
    first = number * plan.shards
    shard_sequences = sum(replica.sequences for replica in plan.replicas[first : first + plan.shards])
    return LocalSgdReducer(OuterOptimizer(group, list(local), codec), plan.sequences / shard_sequences)


class ShardedReducer(Reducer):
    """The reducer of stages with a sharded state.

    FSDP sums their gradients within the backward pass. The reducer only counts the bytes and holds the residuals.
    """

    def __init__(self, stages: Sequence[InstrumentedStage]) -> None:
        self._stages = stages
        self._residuals = {
            f"stage{stage.stage_index}.": residuals
            for stage in stages
            if isinstance(stage, ShardedStage) and (residuals := stage.residuals) is not None
        }

    def reduce(self, gradients: list[Tensor]) -> int:
        """Call `end_step` of the stages' residuals. Return the bytes that this rank sent in FSDP's collectives of
        weights and gradients since the pipeline's `take_counters` was last called.

        The gradients are already sums, because the pipeline waits for FSDP's sums.
        """
        for residuals in self._residuals.values():
            residuals.end_step(gradients[0].device)
        sharded = (stage for stage in self._stages if isinstance(stage, ShardedStage))
        if by_stage := [sent for stage in sharded if (sent := take_level_bytes(stage.reduce_scatters)) is not None]:
            self.level_bytes = LevelBytes(*map(sum, zip(*by_stage, strict=True)))
        return sum(stage.counters.sharding_bytes for stage in self._stages)

    def state(self) -> dict[str, Tensor]:
        return {
            prefix + key: tensor
            for prefix, residuals in self._residuals.items()
            for key, tensor in residuals.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for prefix, residuals in self._residuals.items():
            of_stage = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
            residuals.load_state(of_stage)

    def metrics(self) -> dict[str, float]:
        return residual_metrics(list(self._residuals.values())) if self._residuals else {}


class LocalSgdReducer(Reducer):
    """The reducer of local SGD: it sums no gradients, but makes a replica's gradient the mean over the replica's own
    targets.

    The outer optimizer combines the replicas' weights after the optimizer's step.
    """

    def __init__(self, outer_optimizer: OuterOptimizer, share: float) -> None:
        """Create the reducer before the first step.

        Args:
            outer_optimizer: combines the weights of the replicas.
            share: sequences of the global batch per sequence of this replica. The loss was divided by the targets of
                the global batch, and every sequence has equally many, so a gradient times `share` is the mean over this
                replica's targets.
        """
        self._outer_optimizer = self.holder = outer_optimizer
        self._share = share

    def reduce(self, gradients: list[Tensor]) -> int:
        torch._foreach_mul_(gradients, self._share)
        return 0

    def after_step(self, step: int) -> int:
        with ACTIVITY.doing("outer sync", waits="dp"):
            return self._outer_optimizer.after_step(step)

    def before_checkpoint(self) -> None:
        with ACTIVITY.doing("outer sync for a checkpoint", waits="dp"):
            self._outer_optimizer.outer_sync()


class ShardedNodeLevel(NodeLevel):
    """The level within nodes for hybrid sharding: FSDP sums gradients within the backward pass, and leaves each rank
    the sums of its shard. The sums are not gathered afterwards, because FSDP gathers the updated weights."""

    def __init__(self, stages: Sequence[InstrumentedStage]) -> None:
        self._sharded = ShardedReducer(stages)

    def scatter(self, gradients: list[Tensor]) -> tuple[list[Tensor], int]:
        return gradients, self._sharded.reduce(gradients)

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, hooks: bool, between: Reducer
    ) -> None:
        self._between = between
        between.overlap(parameters, groups, hooks)

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        self._between.group_done(number, gradients)

    def defer(self, deferred: bool) -> None:
        self._between.defer(deferred)
