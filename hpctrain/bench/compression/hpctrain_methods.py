"""hpctrain's own gradient synchronisations as a bench opens them: through the product's public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.bench.compression.bench_trainer import GradientSync, ReducerSync
from hpctrain.compress.build import build_reduce_scatters, build_reducer, residuals_of
from hpctrain.compress.collectives.reduce_scatter import Residuals
from hpctrain.compress.reducers.outer_optimizer import OuterOptimizer
from hpctrain.compress.reducers.reduce_scatter_all_gather import ReduceScatterAllGather
from hpctrain.compress.reducers.reducer import DenseReducer
from hpctrain.parallel.fsdp import apply_sharding, flat_gradient_layouts, track_collectives
from hpctrain.records.plan.codec import CodecSpec
from hpctrain.records.plan.compression import Codec

_CODEC: TypeAdapter[Any] = TypeAdapter(Codec)


def codec_spec(settings: dict[str, Any], dense_steps: int) -> CodecSpec:
    """The codec of `compression` as in run.yaml, with that many exact steps at its beginning if it has any."""
    codec = _CODEC.validate_python(settings)
    if "warmup_steps" in type(codec).model_fields:
        codec = codec.model_copy(update={"warmup_steps": dense_steps})
    return CodecSpec(codec=codec)


def open_reducer(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> ReducerSync:
    """Whole replicas with a codec's reducer; it overlaps the backward pass where a worker would overlap it."""
    names, shapes = zip(*((name, parameter.shape) for name, parameter in model.named_parameters()), strict=True)
    reducer = build_reducer(group, names, shapes, codec_spec(settings, dense_steps))
    if isinstance(reducer, DenseReducer | ReduceScatterAllGather):
        reducer.overlap(list(model.parameters()))
    return ReducerSync(model, reducer)


def open_chosen(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> GradientSync:
    """Whole replicas with the reducer of the codec in a plan."""
    exchange = open_reducer(spec.codec.model_dump(), model, group, dense_steps)
    exchange.planned = spec
    return exchange


def open_local_steps(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup) -> GradientSync:
    """Whole replicas that train separately and synchronise every few steps (local SGD)."""
    codec = _CODEC.validate_python(settings)
    parameters = list(model.parameters())
    return LocalSgdSync(model, OuterOptimizer(group, parameters, codec.every, codec.outer_lr, codec.outer_momentum))


def open_sharded(
    settings: dict[str, Any],
    model: nn.Module,
    group: dist.ProcessGroup,
    dense_steps: int,
    zero: int = 3,
    compute: torch.dtype | None = None,
) -> GradientSync:
    """Sharded state with the reduce-scatter of a codec; weights are gathered in the precision of the computation."""
    apply_sharding(model, DeviceMesh.from_group(group, "cpu"), zero, compute)
    counted = _Counted()
    scatters = build_reduce_scatters(codec_spec(settings, dense_steps), flat_gradient_layouts(model), group, "cpu")
    track_collectives(model, 0, counted.add, 1, lambda: False, scatters)
    called = model if compute is None else _InPrecision(model, compute)
    return ShardedSync(called, counted.take, residuals_of(scatters))


class LocalSgdSync:
    """Local SGD: no gradient is sent; the weights are synchronised after the optimizer."""

    averages = True

    def __init__(self, model: nn.Module, local_steps: OuterOptimizer) -> None:
        self.model = model
        self._local_steps = local_steps
        self._step = 0

    def reduce(self) -> int | None:
        return 0

    def after_step(self) -> int:
        self._step += 1
        return self._local_steps.after_step(self._step)


class ShardedSync:
    """Weights are gathered and gradients summed part by part, during the forward and backward pass."""

    averages = False

    def __init__(self, model: nn.Module, sent_bytes: Callable[[], int], residuals: Residuals | None) -> None:
        self.model = model
        self._sent_bytes = sent_bytes
        self._unsent = residuals

    def reduce(self) -> int | None:
        if self._unsent is not None:
            self._unsent.end_step(torch.device("cpu"))
        return self._sent_bytes()

    def after_step(self) -> int:
        return 0


class _InPrecision(nn.Module):
    """A model whose matrix products use a lower precision than the rest, as in training."""

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
