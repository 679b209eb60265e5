"""The gradient synchronisations that `hpctrain bench compression` compares: torch's and hpctrain's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain.bench.compression.bench_trainer import GradientSync, NoSync, TorchSync
from hpctrain.bench.compression.hpctrain_methods import open_chosen, open_local_steps, open_reducer, open_sharded
from hpctrain.bench.compression.planned_codec import StepWorkload, choose_codec
from hpctrain.model.imported.model import blocks_of

AUTO = "auto"
ONE_BUCKET_MB = 1 << 14
"""Bucket size for torch's PowerSGD hook. It starts collectives in callbacks; on gloo, only one bucket works."""


@dataclass(frozen=True)
class MethodContext:
    """The processes and settings that a method is opened with."""

    group: dist.ProcessGroup
    """A process group for this method alone, so that collectives of other methods do not interleave."""
    dense_steps: int
    """Exact steps at the beginning, for methods that need statistics or a warm start."""
    work: StepWorkload

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)


Open = Callable[[nn.Module, MethodContext], GradientSync]


@dataclass(frozen=True)
class Method:
    """One method of the comparison."""

    title: str
    open: Open


def _alone(model: nn.Module, occasion: MethodContext) -> GradientSync:
    return NoSync(model)


def _ddp(item_bytes: int, hook: Callable[..., Any] | None) -> Open:
    """DDP in fp32, with its own all-reduce or with a communication hook."""

    def open_(model: nn.Module, occasion: MethodContext) -> GradientSync:
        wrapped = _wrapped(model, occasion)
        if hook is not None:
            wrapped.register_comm_hook(occasion.group, hook)
        return TorchSync(wrapped, _ring_bytes(model, occasion.world) * item_bytes)

    return open_


def _torch_power_sgd(rank: int) -> Open:
    def open_(model: nn.Module, occasion: MethodContext) -> GradientSync:
        wrapped = _wrapped(model, occasion, bucket_cap_mb=ONE_BUCKET_MB)
        start = max(2, occasion.dense_steps)  # torch requires it: DDP rebuilds its buckets after the first step
        state = power_sgd.PowerSGDState(occasion.group, rank, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
        return TorchSync(wrapped, None)

    return open_


def _wrapped(model: nn.Module, occasion: MethodContext, **keys: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=occasion.group, gradient_as_bucket_view=True, **keys)


def _fsdp2(dtype: torch.dtype | None) -> Open:
    """FSDP2 with its defaults: each block by itself, weights resharded after the forward pass (ZeRO 3)."""

    def open_(model: nn.Module, occasion: MethodContext) -> GradientSync:
        mesh = DeviceMesh.from_group(occasion.group, "cpu")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for block in blocks_of(model).values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return TorchSync(model, None)

    return open_


def _ours(settings: dict[str, Any]) -> Open:
    """Whole replicas and the reducer that `compression` in run.yaml selects."""
    return lambda model, occasion: open_reducer(settings, model, occasion.group, occasion.dense_steps)


def _ours_sharded(settings: dict[str, Any], zero: int = 3, compute: torch.dtype | None = None) -> Open:
    return lambda model, occasion: open_sharded(settings, model, occasion.group, occasion.dense_steps, zero, compute)


def _auto(model: nn.Module, occasion: MethodContext) -> GradientSync:
    chosen = choose_codec(occasion.group, occasion.work)
    return open_chosen(chosen, model, occasion.group, occasion.dense_steps)


def _local_steps(model: nn.Module, occasion: MethodContext) -> GradientSync:
    return open_local_steps({"mode": "local_steps", "every": 10}, model, occasion.group)


def _ring_bytes(model: nn.Module, world: int) -> int:
    """Values that a rank sends in a ring all-reduce of all gradients."""
    return 2 * (world - 1) * sum(parameter.numel() for parameter in model.parameters()) // world


_TOPK_SYNC = {"mode": "topk", "density": 0.1, "selector": "exact", "values": "fp32"}
_PAPER = {
    "mode": "adaptive", "form": "paper", "feedback": "paper", "selector": "exact", "values": "fp32",
    "reset": "zero", "reset_every": 1000,
}  # fmt: skip


def _tagc(ratio: float | str, density: float) -> dict[str, Any]:
    """Compression settings with ratio and density as published together (TAGC, table 1)."""
    return {"mode": "tagc", "ratio": ratio, "density": density}


# DDP rejects torch's bf16 hook on gloo by the function's name, though gloo can sum bf16: hence the lambda.
METHODS: dict[str, Method] = {
    "none": Method("no communication", _alone),
    "ddp_fp32": Method("torch DDP, all-reduce in fp32", _ddp(4, None)),
    "ddp_bf16": Method(
        "torch DDP, all-reduce in bf16", _ddp(2, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    ),
    "powersgd_r1": Method("torch DDP with its PowerSGD hook, rank 1, one bucket", _torch_power_sgd(1)),
    "powersgd_r4": Method("torch DDP with its PowerSGD hook, rank 4, one bucket", _torch_power_sgd(4)),
    "fsdp2_fp32": Method("torch FSDP2 in fp32", _fsdp2(None)),
    "fsdp2_bf16": Method("torch FSDP2, weights and gradients in bf16", _fsdp2(torch.bfloat16)),
    "dense": Method("ours, exact sums in fp32", _ours({"mode": "none"})),
    "bf16": Method("ours, bf16 on the wire", _ours({"mode": "bf16"})),
    "int8": Method("ours, integers of 8 bits with feedback", _ours({"mode": "int8"})),
    "int4": Method("ours, integers of 4 bits with feedback", _ours({"mode": "int4"})),
    "power_sgd_r1": Method("ours, products of rank 1", _ours({"mode": "power_sgd", "rank": 1})),
    "power_sgd_r4": Method("ours, products of rank 4", _ours({"mode": "power_sgd", "rank": 4})),
    "power_sgd_r16": Method("ours, products of rank 16", _ours({"mode": "power_sgd", "rank": 16})),
    "topk_10": Method("ours, 10 % of each layer, exactly chosen, in fp32 (TopK-Sync)", _ours(_TOPK_SYNC)),
    "topk_7": Method(
        "ours, 7 % of each layer, by sampled thresholds, in bf16", _ours({"mode": "topk", "density": 0.07})
    ),
    "tagc_2x": Method("ours, 20 % as a sketch of half the size", _ours(_tagc(2, 0.2))),
    "tagc_4x": Method("ours, 10 % as a sketch of a quarter", _ours(_tagc(4, 0.1))),
    "tagc_10x": Method("ours, 1.25 % as a sketch of a tenth", _ours(_tagc(10, 0.0125))),
    "tagc_auto": Method("ours, 5 % in the smallest message that all is read from", _ours(_tagc("auto", 0.05))),
    "adaptive_paper": Method("the paper's equations (2) to (5) word for word, 5 to 30 % in fp32", _ours(_PAPER)),
    "adaptive": Method("ours, 5 to 30 % by each layer's variance", _ours({"mode": "adaptive"})),
    "adaptive_no_feedback": Method(
        "as adaptive, what is not sent is lost", _ours({"mode": "adaptive", "feedback": "none"})
    ),
    AUTO: Method("ours, what the planner chooses for the link and the device", _auto),
    "local_steps": Method("ours, a meeting of the weights every 10 steps", _local_steps),
    "fsdp2_dense": Method("ours, ZeRO 3 in fp32, each number sent once", _ours_sharded({"mode": "none"})),
    "fsdp2_sparse": Method(
        "ours, ZeRO 2, weights gathered once in bf16, 10 % of the gradients, in bf16",
        _ours_sharded({"mode": "topk", "density": 0.1}, zero=2, compute=torch.bfloat16),
    ),
    "fsdp2_int8": Method(
        "ours, ZeRO 2, weights gathered once in bf16, gradients as integers of 8 bits with feedback",
        _ours_sharded({"mode": "int8"}, zero=2, compute=torch.bfloat16),
    ),
    "fsdp2_int4": Method(
        "ours, ZeRO 2, weights gathered once in bf16, gradients as integers of 4 bits with feedback",
        _ours_sharded({"mode": "int4"}, zero=2, compute=torch.bfloat16),
    ),
}
"""Method by its name in `--method` and in the record."""
