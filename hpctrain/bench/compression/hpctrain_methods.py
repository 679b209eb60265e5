"""hpctrain's gradient synchronisations for the bench, opened through the functions that workers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.bench.compression.bench_trainer import GradientSync, ReducerSync
from hpctrain.compress.build import build_reduce_scatters, build_reducer
from hpctrain.compress.collectives.reduce_scatter import Residuals, residuals_of
from hpctrain.compress.reducers.outer_optimizer import OuterOptimizer
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.fsdp import apply_sharding, flat_gradient_layouts, track_collectives
from hpctrain.parallel.gradient_reducer import LocalSgdReducer
from hpctrain.records.plan.compression import CodecSpec, LocalSteps, make_codec


def codec_spec(settings: dict[str, Any], dense_steps: int) -> CodecSpec:
    """Return the codec of `settings`, the `compression` of a run file; its warm-up has `dense_steps` steps if it has
    one."""
    codec = make_codec(settings)
    if "warmup_steps" in type(codec).model_fields:
        codec = codec.model_copy(update={"warmup_steps": dense_steps})
    return CodecSpec(codec=codec)


def open_codec(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> GradientSync:
    """Return whole replicas with a codec; its reducer overlaps the backward pass where a worker would overlap it."""
    return _open(codec_spec(settings, dense_steps), model, group)


def open_chosen(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> GradientSync:
    """Return whole replicas with the reducer of a plan's codec."""
    exchange = _open(codec_spec(spec.codec.to_json(), dense_steps), model, group)
    exchange.planned = spec
    return exchange


def _open(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup) -> GradientSync:
    names, shapes = zip(*((name, parameter.shape) for name, parameter in model.named_parameters()), strict=True)
    parameters = list(model.parameters())
    reducer: Reducer
    if isinstance(spec.codec, LocalSteps):
        reducer = LocalSgdReducer(OuterOptimizer(group, parameters, spec.codec), dist.get_world_size(group))
    else:
        reducer = build_reducer(group, names, shapes, spec)
    reducer.overlap(parameters)
    return ReducerSync(model, reducer)


def open_sharded(
    settings: dict[str, Any],
    model: nn.Module,
    group: dist.ProcessGroup,
    dense_steps: int,
    zero: int = 3,
    compute: torch.dtype | None = None,
) -> GradientSync:
    """Return a sharded model with the reduce-scatter of a codec; weights are gathered in the precision of the
    computation."""
    apply_sharding(model, DeviceMesh.from_group(group, "cpu"), zero, compute)
    counted = _Counted()
    scatters = build_reduce_scatters(codec_spec(settings, dense_steps), flat_gradient_layouts(model), group, "cpu")
    track_collectives(model, 0, counted.add, 1, lambda: False, scatters)
    called = model if compute is None else _InPrecision(model, compute)
    return ShardedSync(called, counted.take, residuals_of(scatters))


class ShardedSync(GradientSync):
    """Synchronisation of a sharded model: weights are gathered and gradients summed module by module, during the
    forward and the backward pass."""

    averages = False

    def __init__(self, model: nn.Module, sent_bytes: Callable[[], int], residuals: Residuals | None) -> None:
        super().__init__(model)
        self._sent_bytes = sent_bytes
        self._residuals = residuals

    def reduce(self) -> int | None:
        if self._residuals is not None:
            self._residuals.end_step(torch.device("cpu"))
        return self._sent_bytes()


class _InPrecision(nn.Module):
    """A model that computes matrix products in a lower precision than other operations, as in training."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", self._dtype):
            logits: Tensor = self.model(tokens)
        return logits


class _Counted:
    """A byte counter that `take` resets."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count

    def take(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken
