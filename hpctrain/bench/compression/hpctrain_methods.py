"""hpctrain's own gradient synchronisations as a bench opens them: through the product's public functions."""

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
from hpctrain.parallel.fsdp import apply_sharding, flat_gradient_layouts, track_collectives
from hpctrain.records.plan.codec import CodecSpec
from hpctrain.records.plan.compression import LocalSteps, make_codec


def codec_spec(settings: dict[str, Any], dense_steps: int) -> CodecSpec:
    """The codec of `compression` as in run.yaml, with that many exact steps at its beginning if it has any."""
    codec = make_codec(settings)
    if "warmup_steps" in type(codec).model_fields:
        codec = codec.model_copy(update={"warmup_steps": dense_steps})
    return CodecSpec(codec=codec)


def open_codec(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> GradientSync:
    """Whole replicas with a codec; its reducer overlaps the backward pass where a worker would overlap it."""
    spec = codec_spec(settings, dense_steps)
    if isinstance(spec.codec, LocalSteps):
        return LocalSgdSync(model, OuterOptimizer(group, list(model.parameters()), spec.codec))
    return _open_reducer(spec, model, group)


def open_chosen(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> GradientSync:
    """Whole replicas with the reducer of the codec in a plan."""
    exchange = _open_reducer(codec_spec(spec.codec.to_json(), dense_steps), model, group)
    exchange.planned = spec
    return exchange


def _open_reducer(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup) -> ReducerSync:
    names, shapes = zip(*((name, parameter.shape) for name, parameter in model.named_parameters()), strict=True)
    reducer = build_reducer(group, names, shapes, spec)
    reducer.overlap(list(model.parameters()))
    return ReducerSync(model, reducer)


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

    def __init__(self, model: nn.Module, outer_optimizer: OuterOptimizer) -> None:
        self.model = model
        self._outer_optimizer = outer_optimizer
        self._step = 0

    def reduce(self) -> int | None:
        return 0

    def after_step(self) -> int:
        self._step += 1
        return self._outer_optimizer.after_step(self._step)


class ShardedSync:
    """Weights are gathered and gradients summed part by part, during the forward and backward pass."""

    averages = False

    def __init__(self, model: nn.Module, sent_bytes: Callable[[], int], residuals: Residuals | None) -> None:
        self.model = model
        self._sent_bytes = sent_bytes
        self._residuals = residuals

    def reduce(self) -> int | None:
        if self._residuals is not None:
            self._residuals.end_step(torch.device("cpu"))
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
