"""What sums the gradients of a rank over the replicas of its plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpctrain.compress.build import build_reducer
from hpctrain.compress.collectives.scatter import density_and_ratio
from hpctrain.compress.reducers.outer_optimizer import LocalSteps
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.sharded_stage import ShardedStage
from hpctrain.parallel.stage import CountedStage
from hpctrain.records.plan.compression import LocalSteps as LocalStepsSettings
from hpctrain.records.plan.plan import Plan

Named = Sequence[tuple[str, nn.Parameter]]


def reducer_of(plan: Plan, mesh: DeviceMesh, stages: Sequence[CountedStage], parameters: Named) -> Reducer:
    """What sums the gradients of these stages over replicas.

    Args:
        parameters: name and parameter for each gradient that it is going to get, in that order.
    """
    if plan.shards > 1 and not plan.reduces_copies:
        return ShardedReducer(stages)
    axis = "copy" if plan.reduces_copies else "dp"
    names = [name for name, _ in parameters]
    local = [_local(parameter) for _, parameter in parameters]
    reducer: Reducer
    if isinstance(plan.codec, LocalStepsSettings) and plan.dp > 1:
        first = mesh.get_local_rank(axis) * plan.shards
        rows = sum(replica.rows for replica in plan.replicas[first : first + plan.shards])
        reducer = OwnGradients(_meetings(mesh.get_group(axis), local, plan.codec), plan.rows / rows)
    else:
        reducer = build_reducer(mesh.get_group(axis), names, [part.shape for part in local], plan.compression[0])
    return CopiesReducer(ShardedReducer(stages), reducer) if plan.reduces_copies else reducer


class ShardedReducer:
    """The reducer of sharded stages: the sums were taken in the backward pass, so it tells of their bytes, and has what
    was not sent of them."""

    def __init__(self, stages: Sequence[CountedStage]) -> None:
        self._stages = stages
        self._unsent = {
            f"stage{stage.stage_index}.": unsent
            for stage in stages
            if isinstance(stage, ShardedStage) and (unsent := stage.unsent) is not None
        }

    def reduce(self, gradients: list[Tensor]) -> int:
        """Bytes that this rank sent since the counters were last taken: weights gathered and gradients summed."""
        for unsent in self._unsent.values():
            unsent.end_step(gradients[0].device)
        return sum(stage.counters.sharding_bytes for stage in self._stages)

    def state(self) -> dict[str, Tensor]:
        return {prefix + key: kept for prefix, unsent in self._unsent.items() for key, kept in unsent.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for prefix, unsent in self._unsent.items():
            mine = {key.removeprefix(prefix): kept for key, kept in state.items() if key.startswith(prefix)}
            unsent.load_state(mine)

    def drop_state(self) -> None:
        self.load_state({})

    def metrics(self) -> dict[str, float]:
        return density_and_ratio(list(self._unsent.values())) if self._unsent else {}


class OwnGradients:
    """The reducer of replicas that train on their own: nothing is summed, and a replica's gradient is the mean over its
    own tokens. Their meetings, which come after the optimizer's step, are the other part of it."""

    def __init__(self, meetings: LocalSteps, share: float) -> None:
        """
        Args:
            meetings: of the replicas.
            share: tokens of the job for each token of this replica, by which its loss was divided too much.
        """
        self.meetings = meetings
        self._share = share

    def reduce(self, gradients: list[Tensor]) -> int:
        torch._foreach_mul_(gradients, self._share)
        return 0

    def state(self) -> dict[str, Tensor]:
        return self.meetings.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.meetings.load_state(state)

    def drop_state(self) -> None:
        self.meetings.drop_state()

    def metrics(self) -> dict[str, float]:
        return {}


class CopiesReducer:
    """Sums the gradients of the copies of a sharded state, once they are sums within each copy."""

    def __init__(self, within: Reducer, between: Reducer) -> None:
        self._within = within
        self.between = between

    def reduce(self, gradients: list[Tensor]) -> int:
        return self._within.reduce(gradients) + self.between.reduce(gradients)

    def state(self) -> dict[str, Tensor]:
        return self.between.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.between.load_state(state)

    def drop_state(self) -> None:
        self.between.drop_state()

    def metrics(self) -> dict[str, float]:
        return self.between.metrics()


def meetings_of(reducer: Reducer) -> LocalSteps | None:
    """The meetings of replicas that train on their own, where they do."""
    inner = reducer.between if isinstance(reducer, CopiesReducer) else reducer
    return inner.meetings if isinstance(inner, OwnGradients) else None


def _meetings(group: dist.ProcessGroup, weights: list[Tensor], codec: LocalStepsSettings) -> LocalSteps:
    return LocalSteps(group, weights, codec.every, codec.outer_lr, codec.outer_momentum)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
