"""The gradient synchronisations that `hpctrain bench compression` compares: torch's and hpctrain's.

The synchronisations of hpctrain are set up by the functions that workers use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain.bench.compression.bench_trainer import GradientSync
from hpctrain.bench.compression.planned_codec import USUAL_CHOICE, ChoiceRequest, StepWorkload, measured_plan
from hpctrain.compress.build import build_reduce_scatters, build_reducer
from hpctrain.compress.collectives.level_reduce_scatter import LevelGroups
from hpctrain.compress.collectives.reduce_scatter import residuals_of
from hpctrain.compress.collectives.sums_in_flight import SumsInFlight
from hpctrain.compress.reducers.levels import LevelReducer, ReplicatedNodeLevel
from hpctrain.compress.reducers.outer_optimizer import OuterOptimizer
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.model.imported.model import blocks_of
from hpctrain.parallel.fsdp import apply_sharding, flat_gradient_layouts, track_collectives
from hpctrain.parallel.gradient_reducer import LocalSgdReducer
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import MODES, make_codec
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import WARMUP_SHARE, PowerSgd
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.rotated import RotatedIntegers

AUTO = "auto"
"""Name of the method whose codec the planner chooses."""
ONE_BUCKET_MB = 1 << 14
"""Bucket size in MB with which torch's PowerSGD hook gets all gradients in one bucket. The hook starts collectives in
callbacks, which on gloo works with one bucket only."""
_PAPER = {
    "form": "paper", "feedback": "paper", "selector": "exact", "values": "fp32", "reset": "zero", "reset_every": 1000,
}  # fmt: skip
_PUBLISHED = {"layers": "non_attention_linear"}
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"dense": {}},
    "power_sgd": {
        **{f"power_sgd_r{rank}": {"rank": rank} for rank in (1, 4, 16)},
        **{f"power_sgd_r4_{rest}": {"rank": 4, "remainder": rest} for rest in ("int2", "int1")},
        **{f"power_sgd_auto_{rest}": {"rank": "auto", "remainder": rest} for rest in ("int2", "int1")},
    },
    "topk": {
        "topk_10": {"density": 0.1, "selector": "exact", "values": "fp32"},  # TopK-Sync
        "topk_7": {"density": 0.07},
    },
    # Ratio and density as published together (TAGC, table 1); auto takes the smallest message from which all values can
    # be read.
    "tagc": {
        "tagc_2x": {"ratio": 2, "density": 0.2},
        "tagc_4x": {"ratio": 4, "density": 0.1},
        "tagc_10x": {"ratio": 10, "density": 0.0125},
        "tagc_auto": {"ratio": "auto", "density": 0.05},
        # The sum of single bits, or of 4 bits, that stands for the index in the published code.
        **{
            f"tagc_{ratio}x_{index}": {"ratio": ratio, "density": density, "index": index, **_PUBLISHED}
            for ratio, density in ((2, 0.2), (10, 0.0125))
            for index in ("1bit", "4bit")
        },
    },
    "local_steps": {
        "local_steps": {},
        "local_steps_int4": {"values": "int4"},
        "local_steps_stream": {"values": "int4", "parts": 5, "overlap_steps": 1},
    },
    # The first variant follows the paper's equations (2) to (5) to the letter.
    "adaptive": {"adaptive_paper": _PAPER, "adaptive": {}, "adaptive_no_feedback": {"feedback": "none"}},
}
"""Mode -> name of a method -> settings of the codec. A mode that is not in this table is one method, which has the name
of the mode and its default settings."""
CODEC_METHODS: dict[str, dict[str, Any]] = {
    name: {"mode": mode, **settings} for mode in MODES for name, settings in _VARIANTS.get(mode, {mode: {}}).items()
}
"""Name of a method -> the `compression` of a run file; each mode has at least one method."""


@dataclass(frozen=True)
class MethodContext:
    """The process group and the settings with which a method is set up."""

    group: dist.ProcessGroup
    """A process group for this method alone, so that collectives of other methods do not interleave."""
    dense_steps: int
    """Warm-up steps of the methods that have a warm-up: the first steps, which sum gradients exactly."""
    work: StepWorkload
    devices: int = 1
    """Processes on each node, which are neighbours in the group."""
    run_steps: int = 0
    """Steps of a training whose losses are compared; 0 where times are measured. Low-rank methods have a tenth of them
    as warm-up steps, if that is more than `dense_steps`."""
    choice: ChoiceRequest = USUAL_CHOICE
    """For what the method auto asks the planner."""

    @property
    def low_rank_dense_steps(self) -> int:
        """Return the number of warm-up steps of low-rank methods."""
        return max(self.dense_steps, math.ceil(WARMUP_SHARE * self.run_steps))

    @cached_property
    def level_groups(self) -> LevelGroups:
        """The process groups of this rank's node, and of the ranks with its place on the other nodes. The context's
        group must have all processes. The first access makes the groups, and is collective."""
        rank, world, count = dist.get_rank(self.group), dist.get_world_size(self.group), self.devices
        within = [dist.new_group(list(range(first, first + count))) for first in range(0, world, count)]
        between = [dist.new_group(list(range(place, world, count))) for place in range(count)]
        return LevelGroups(within[rank // count], between[rank % count])


Open = Callable[[nn.Module, MethodContext], GradientSync]
"""Function that sets up a method on a model: takes the model and the context, returns the gradient synchronisation."""


def _ddp(item_bytes: int, hook: Callable[..., Any] | None) -> Open:
    """Return the function that sets up torch's DDP in fp32, with its own all-reduce or with a communication hook.

    Args:
        item_bytes: bytes of a value as it is sent.
        hook: torch's communication hook; None for DDP's own all-reduce.
    """

    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        wrapped = _wrapped(model, context)
        if hook is not None:
            wrapped.register_comm_hook(context.group, hook)
        sent_bytes = _ring_numbers(model, dist.get_world_size(context.group)) * item_bytes
        return GradientSync(wrapped, reduce=lambda: sent_bytes)

    return open_


def _torch_power_sgd(rank: int) -> Open:
    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        wrapped = _wrapped(model, context, bucket_cap_mb=ONE_BUCKET_MB)
        start = max(2, context.low_rank_dense_steps)  # torch requires it: DDP rebuilds its buckets after the first step
        state = power_sgd.PowerSGDState(context.group, rank, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
        return GradientSync(wrapped, reduce=lambda: None)

    return open_


def _wrapped(model: nn.Module, context: MethodContext, **keys: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=context.group, gradient_as_bucket_view=True, **keys)


def _fsdp2(dtype: torch.dtype | None) -> Open:
    """Return the function that wraps a model by FSDP2 with torch's defaults: each block is sharded by itself, and
    weights are resharded after the forward pass (ZeRO 3).

    Args:
        dtype: precision of the computation and of the sums; None for fp32.
    """

    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        mesh = DeviceMesh.from_group(context.group, "cpu")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for block in blocks_of(model).values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return GradientSync(model, reduce=lambda: None)

    return open_


def _by_level(settings: dict[str, Any], dtype: torch.dtype | None, planned: Plan | None = None) -> Open:
    """Return the function that sets up a method in which the processes of a node sum gradients first, and the nodes sum
    the parts with one of hpctrain's reducers.

    Args:
        settings: the `compression` of a run file, which selects the reducer between nodes.
        dtype: dtype of the numbers in messages within a node; None: fp32.
        planned: the plan with these settings, which the method reports; None for a method that does not ask the
            planner.
    """

    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        groups = context.level_groups
        names, parameters = zip(*model.named_parameters(), strict=True)
        within = ReplicatedNodeLevel(groups.within, [parameter.shape for parameter in parameters], dtype)
        spec = _codec_spec(settings, context)
        reducer = LevelReducer(within, build_reducer(groups.between, names, within.part_shapes, spec))
        reducer.overlap(list(parameters))

        def reduce() -> int | None:
            return reducer.reduce([p.grad for p in parameters if p.grad is not None])

        return GradientSync(model, False, reduce, planned=planned)

    return open_


def _codec(settings: dict[str, Any], planned: Plan | None = None) -> Open:
    """Return the function that sets up a method in which every process holds a whole replica and sums gradients with
    one of hpctrain's reducers. The reducer overlaps the backward pass where it does so in a worker.

    Args:
        settings: the `compression` of a run file, which selects the reducer.
        planned: as of `_by_level`.
    """

    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        spec = _codec_spec(settings, context)
        names, shapes = zip(*((name, parameter.shape) for name, parameter in model.named_parameters()), strict=True)
        parameters = list(model.parameters())
        reducer: Reducer
        if isinstance(spec.codec, LocalSteps):
            outer = OuterOptimizer(context.group, parameters, spec.codec)
            reducer = LocalSgdReducer(outer, dist.get_world_size(context.group))
        else:
            reducer = build_reducer(context.group, names, shapes, spec)
        reducer.overlap(parameters)

        def reduce() -> int | None:
            return reducer.reduce([p.grad for p in parameters if p.grad is not None])

        return GradientSync(model, False, reduce, reducer.after_step, planned)

    return open_


def _codec_spec(settings: dict[str, Any], context: MethodContext) -> CodecSpec:
    """Return the codec that `settings`, the `compression` of a run file, describe. If the codec has a warm-up, the
    context says how many steps the warm-up has."""
    codec = make_codec(settings)
    if "warmup_steps" in type(codec).model_fields:
        steps = context.low_rank_dense_steps if isinstance(codec, PowerSgd) else context.dense_steps
        codec = codec.model_copy(update={"warmup_steps": steps})
    return CodecSpec(codec=codec)


def _auto(model: nn.Module, context: MethodContext) -> GradientSync:
    """Return the gradient synchronisation of whole (unsharded) replicas with the codec, and by the levels, that the
    planner chooses for the links and the devices."""
    node = context.level_groups.within if context.devices > 1 else None
    planned = measured_plan(context.group, node, context.work, context.choice)
    settings = planned.codec.to_json()
    match planned.intra_node:
        case "flat":
            open_ = _codec(settings, planned)
        case "none":
            open_ = _by_level(settings, None, planned)
        case "bf16":
            open_ = _by_level(settings, torch.bfloat16, planned)
    return open_(model, context)


def _sharded(settings: dict[str, Any], zero: int = 2, compute: torch.dtype | None = torch.bfloat16) -> Open:
    """Return the function that shards a model and gives it the reduce-scatter of a codec, as a worker does. Modules
    gather their weights and sum their gradients one by one, during the forward and the backward pass; with ZeRO 2,
    weights are gathered once a step.

    Args:
        settings: the `compression` of a run file.
        zero: ZeRO level.
        compute: precision of the computation and of gathered weights; None for fp32.
    """

    def open_(model: nn.Module, context: MethodContext) -> GradientSync:
        apply_sharding(model, DeviceMesh.from_group(context.group, "cpu"), zero, compute)
        spec, layouts = _codec_spec(settings, context), flat_gradient_layouts(model)
        scatters = build_reduce_scatters(spec, layouts, context.group, "cpu")
        counts: list[int] = []
        in_flight = SumsInFlight()
        track_collectives(model, 0, counts.append, 1, lambda: False, scatters, in_flight)
        residuals = residuals_of(scatters)

        def reduce() -> int:
            in_flight.finish()
            if residuals is not None:
                residuals.end_step(torch.device("cpu"))
            sent_bytes = sum(counts)
            counts.clear()
            return sent_bytes

        return GradientSync(model if compute is None else _InPrecision(model, compute), False, reduce)

    return open_


class _InPrecision(nn.Module):
    """A model that computes matrix products in the lower precision `dtype`, under torch's autocast, as a worker
    does."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", self._dtype):
            logits: Tensor = self.model(tokens)
        return logits


def _ring_numbers(model: nn.Module, world: int) -> int:
    """Return how many numbers a rank sends in a ring all-reduce of all gradients."""
    return 2 * (world - 1) * sum(parameter.numel() for parameter in model.parameters()) // world


LEVEL_METHODS: dict[str, Open] = {
    "dense_in_nodes": _by_level({"mode": "none"}, None),
    **{f"{mode}_in_nodes": _by_level({"mode": mode}, None) for mode in ("bf16", *Quantized.modes())},
    "int4_in_nodes_bf16": _by_level({"mode": "int4"}, torch.bfloat16),
}
"""Methods that sum within nodes first, in fp32 unless their name ends with bf16; for nodes of several processes."""

# DDP rejects torch's bf16 hook on gloo by the function's name, though gloo can sum bf16: hence the lambda.
METHODS: dict[str, Open] = {
    "none": lambda model, _: GradientSync(model),
    "ddp_fp32": _ddp(4, None),
    "ddp_bf16": _ddp(2, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)),
    "powersgd_r1": _torch_power_sgd(1),
    "powersgd_r4": _torch_power_sgd(4),
    "fsdp2_fp32": _fsdp2(None),
    "fsdp2_bf16": _fsdp2(torch.bfloat16),
    **{name: _codec(settings) for name, settings in CODEC_METHODS.items()},
    AUTO: _auto,
    "fsdp2_dense": _sharded({"mode": "none"}, zero=3, compute=None),
    "fsdp2_sparse": _sharded({"mode": "topk", "density": 0.1}),
    **{f"fsdp2_{mode}": _sharded({"mode": mode}) for mode in (*Quantized.modes(), *RotatedIntegers.modes())},
    # TAGC as published: FSDP in fp32 that reduces to the owner. Also the same with the index of this package.
    **{
        f"fsdp2_{name}": _sharded(CODEC_METHODS[name] | _PUBLISHED, zero=3, compute=None)
        for name in ("tagc_2x", "tagc_10x", "tagc_2x_1bit", "tagc_2x_4bit", "tagc_10x_1bit", "tagc_10x_4bit")
    },
    **LEVEL_METHODS,
}
"""Name of a method, in `--method` and in the record -> function that sets up the method."""
