"""What sums the gradients of a rank over the replicas of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpctrain.compress.build import build_reducer
from hpctrain.compress.reducer import KeepsNothing, Reducer
from hpctrain.parallel.stage import CountedStage
from hpctrain.records.plan import Plan

Named = Sequence[tuple[str, nn.Parameter]]


def reducer_of(plan: Plan, mesh: DeviceMesh, stages: Sequence[CountedStage], parameters: Named) -> Reducer:
    """What sums the gradients of these stages over replicas.

    Args:
        parameters: name and parameter for each gradient that it is going to get, in that order.
    """
    if plan.shards > 1 and not plan.reduces_copies:
        return ShardedReducer(stages)
    names = [name for name, _ in parameters]
    shapes = [_local(parameter).shape for _, parameter in parameters]
    group = mesh.get_group("copy" if plan.reduces_copies else "dp")
    reducer = build_reducer(group, names, shapes, plan.compression[0])
    return CopiesReducer(ShardedReducer(stages), reducer) if plan.reduces_copies else reducer


class ShardedReducer(KeepsNothing):
    """The reducer of sharded stages: the sums were taken in the backward pass, so it only tells of their bytes."""

    def __init__(self, stages: Sequence[CountedStage]) -> None:
        self._stages = stages

    def reduce(self, gradients: list[Tensor]) -> int:
        """Bytes that this rank sent since the counters were last taken: weights gathered and gradients summed."""
        return sum(stage.counters.sharding_bytes for stage in self._stages)


class CopiesReducer:
    """Sums the gradients of the copies of a sharded state, once they are sums within each copy."""

    def __init__(self, within: Reducer, between: Reducer) -> None:
        self._within = within
        self._between = between

    def reduce(self, gradients: list[Tensor]) -> int:
        return self._within.reduce(gradients) + self._between.reduce(gradients)

    def state(self) -> dict[str, Tensor]:
        return self._between.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._between.load_state(state)

    def drop_state(self) -> None:
        self._between.drop_state()

    def metrics(self) -> dict[str, float]:
        return self._between.metrics()


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
