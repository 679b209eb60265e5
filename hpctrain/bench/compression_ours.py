"""Our own ways of summing gradients as a bench opens them: through the product's own door, from a plan's codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.bench.compression_trainee import ByReducer, Exchange
from hpctrain.compress.build import build_reducer, build_scatters
from hpctrain.compress.local_steps import LocalSteps
from hpctrain.compress.reducer import DenseReducer
from hpctrain.parallel.shard import apply_sharding, note_collectives, sharded_parts
from hpctrain.records.codec import CodecSpec
from hpctrain.records.compression import Codec

_CODEC: TypeAdapter[Any] = TypeAdapter(Codec)


def codec_spec(settings: dict[str, Any], dense_steps: int) -> CodecSpec:
    """The codec of `compression` as in run.yaml, with so many exact steps at its beginning if it has any."""
    codec = _CODEC.validate_python(settings)
    if "warmup_steps" in type(codec).model_fields:
        codec = codec.model_copy(update={"warmup_steps": dense_steps})
    return CodecSpec(codec=codec)


def open_reducer(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> ByReducer:
    """Whole replicas with the reducer of a codec."""
    names, shapes = zip(*((name, parameter.shape) for name, parameter in model.named_parameters()), strict=True)
    return ByReducer(model, build_reducer(group, names, shapes, codec_spec(settings, dense_steps)))


def open_chosen(spec: CodecSpec, model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> Exchange:
    """Whole replicas with the reducer of a plan's codec; exact sums beside the backward pass, as a worker has them."""
    exchange = open_reducer(spec.codec.model_dump(), model, group, dense_steps)
    exchange.choice = spec.mode
    if isinstance(exchange.reducer, DenseReducer):
        exchange.reducer.overlap(list(model.parameters()))
    return exchange


def open_local_steps(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup) -> Exchange:
    """Whole replicas that train on their own and meet every few steps."""
    codec = _CODEC.validate_python(settings)
    parameters = list(model.parameters())
    return ByLocalSteps(model, LocalSteps(group, parameters, codec.every, codec.outer_lr, codec.outer_momentum))


def open_sharded(settings: dict[str, Any], model: nn.Module, group: dist.ProcessGroup, dense_steps: int) -> Exchange:
    """ZeRO 3 with the reduce-scatter of a codec."""
    apply_sharding(model, DeviceMesh.from_group(group, "cpu"), zero=3, compute=None)
    counted = _Counted()
    scatters = build_scatters(codec_spec(settings, dense_steps), len(list(sharded_parts(model))), "cpu")
    note_collectives(model, 0, counted.add, 1, lambda: False, scatters)
    return BySharding(model, counted.take)


class ByLocalSteps:
    """No gradient is sent; the weights meet behind the optimizer."""

    averages = True

    def __init__(self, model: nn.Module, local_steps: LocalSteps) -> None:
        self.model = model
        self._local_steps = local_steps
        self._step = 0

    def reduce(self) -> int | None:
        return 0

    def after_step(self) -> int:
        self._step += 1
        return self._local_steps.after_step(self._step)


class BySharding:
    """Weights gathered, and gradients summed, part by part during forward and backward pass."""

    averages = False

    def __init__(self, model: nn.Module, sent_bytes: Callable[[], int]) -> None:
        self.model = model
        self._sent_bytes = sent_bytes

    def reduce(self) -> int | None:
        return self._sent_bytes()

    def after_step(self) -> int:
        return 0


class _Counted:
    """Bytes since they were last taken."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count

    def take(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken
