"""Builds the reducer of a rank from the plan's codec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
import torch.distributed as dist

from hpctrain.compress.codecs.values import ValueCode
from hpctrain.compress.collectives.dense_reduce_scatter import DenseReduceScatter
from hpctrain.compress.collectives.feedback import ErrorFeedback, ResidualReset
from hpctrain.compress.collectives.reduce_scatter import ReduceScatter, Residuals, ShardedParameter
from hpctrain.compress.collectives.sparse_scatter_state import SparseScatterState
from hpctrain.compress.reducers.bf16 import Bf16BucketCodec
from hpctrain.compress.reducers.power_sgd import PowerSgdReducer, PowerSgdSettings
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.quantized_reduce_scatter import QuantizedReduceScatter, QuantizedResiduals
from hpctrain.compress.reducers.reduce_scatter_all_gather import ReduceScatterAllGather
from hpctrain.compress.reducers.reducer import DenseReducer, Reducer
from hpctrain.compress.reducers.sparse import SparseReducer, SparseSettings
from hpctrain.compress.reducers.sparse_reduce_scatter import SparseReduceScatter
from hpctrain.compress.reducers.tagc import TagcReducer, TagcSettings
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.compress.select.sparse_counts import AdaptiveSendCounts, AdaptiveSettings, FixedSendCounts, SendCounts
from hpctrain.records.plan.codec import CodecSpec
from hpctrain.records.plan.compression import (
    MIN_COMPRESSED_ELEMENTS,
    Adaptive,
    Bf16,
    Layers,
    LocalSteps,
    NoCompression,
    PowerSgd,
    Quantized,
    Tagc,
    TopK,
)

ReducerCodec = Bf16 | Quantized | TopK | Adaptive | Tagc | PowerSgd


def build_reducer(
    group: dist.ProcessGroup, names: Sequence[str], shapes: Sequence[torch.Size], spec: CodecSpec
) -> Reducer:
    """Build the reducer of gradients with these names and shapes, in this order.

    Args:
        group: the ranks whose gradients are summed.
        names: names of the parameters, as 'layers.3.attention.wq.weight'.
        shapes: shapes of this rank's parts of the parameters.
    """
    codec = spec.codec
    if isinstance(codec, NoCompression | LocalSteps) or dist.get_world_size(group) == 1:
        return DenseReducer(group)
    chosen = [
        index
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
        if is_compressible(shape, name, codec.layers)
    ]
    if not chosen:
        return DenseReducer(group)
    return _build_codec_reducer(group, chosen, codec)


def _build_codec_reducer(group: dist.ProcessGroup, chosen: list[int], codec: ReducerCodec) -> Reducer:
    match codec:
        case Bf16():
            return ReduceScatterAllGather(group, chosen, Bf16BucketCodec())
        case Quantized():
            return ReduceScatterAllGather(group, chosen, QuantizedBucketCodec(codec.bits))
        case TopK() | Adaptive():
            counts = _counts(codec, group, len(chosen))
            feedback = _feedback(codec, codec.reset, codec.reset_every)
            return SparseReducer(group, chosen, counts, feedback, _sparse_settings(codec))
        case Tagc():
            sketch = TagcSettings(codec.density, codec.ratio, codec.warmup_steps)
            return TagcReducer(group, chosen, sketch, _feedback(codec), select_with_values)
        case PowerSgd():
            products = PowerSgdSettings(codec.rank, codec.warmup_steps, codec.min_compression)
            return PowerSgdReducer(group, chosen, products)


def _counts(codec: TopK | Adaptive, group: dist.ProcessGroup, layers: int) -> SendCounts:
    if isinstance(codec, TopK):
        return FixedSendCounts(group, codec.density, codec.warmup_steps)
    settings = AdaptiveSettings(codec.limits, codec.mapping, codec.form, codec.warmup_steps, codec.reprofile_every)
    return AdaptiveSendCounts(group, layers, settings)


def _feedback(codec: TopK | Adaptive | Tagc, reset: ResidualReset = "none", reset_every: int = 1) -> ErrorFeedback:
    dtype = torch.float32 if codec.residual == "fp32" else torch.bfloat16
    return ErrorFeedback(codec.feedback, beta=codec.beta, reset=reset, reset_every=reset_every, dtype=dtype)


def _sparse_settings(codec: TopK | Adaptive) -> SparseSettings:
    return SparseSettings(codec.selector, ValueCode[codec.values.upper()])


def build_reduce_scatters(
    spec: CodecSpec, parts: Sequence[Sequence[ShardedParameter]], group: dist.ProcessGroup, device_type: str
) -> list[ReduceScatter | None]:
    """Build the reduce-scatter of each part of a sharded stage; None: torch's own.

    Args:
        parts: by part, the parameters in the order of its flat gradient.
        group: the ranks that share the state.
    """
    match spec.codec:
        case TopK() | Adaptive():
            return _sparse_reduce_scatters(spec.codec, parts, group, device_type)
        case Quantized():
            return _quantized_reduce_scatters(spec.codec, parts, device_type)
        case Bf16():
            return [DenseReduceScatter(torch.bfloat16)] * len(parts)
    return [_exact_reduce_scatter(device_type)] * len(parts)


def _exact_reduce_scatter(device_type: str) -> ReduceScatter | None:
    # NCCL's reduce-scatter sends each number once; gloo's does not.
    return DenseReduceScatter() if device_type == "cpu" else None


def _sparse_reduce_scatters(
    codec: TopK | Adaptive, parts: Sequence[Sequence[ShardedParameter]], group: dist.ProcessGroup, device_type: str
) -> list[ReduceScatter | None]:
    chosen = [_compressible_indices(pieces, codec.layers) for pieces in parts]
    firsts = list(accumulate((len(indices) for indices in chosen), initial=0))
    sizes = [math.prod(pieces[index].shape) for pieces, indices in zip(parts, chosen, strict=True) for index in indices]
    steps = SparseScatterState(
        sizes, _counts(codec, group, len(sizes)), _feedback(codec, codec.reset, codec.reset_every)
    )
    return [
        SparseReduceScatter(pieces, indices, first, steps, _sparse_settings(codec))
        if indices
        else _exact_reduce_scatter(device_type)
        for pieces, indices, first in zip(parts, chosen, firsts, strict=False)
    ]


def _quantized_reduce_scatters(
    codec: Quantized, parts: Sequence[Sequence[ShardedParameter]], device_type: str
) -> list[ReduceScatter | None]:
    residuals = QuantizedResiduals(codec.bits)
    return [
        QuantizedReduceScatter(pieces, indices, number, residuals) if indices else _exact_reduce_scatter(device_type)
        for number, pieces in enumerate(parts)
        for indices in [_compressible_indices(pieces, codec.layers)]
    ]


def residuals_of(scatters: Sequence[ReduceScatter | None]) -> Residuals | None:
    """The residuals that a stage's reduce-scatters share; None if the codec has none."""
    for scatter in scatters:
        if isinstance(scatter, SparseReduceScatter):
            return scatter.steps
        if isinstance(scatter, QuantizedReduceScatter):
            return scatter.residuals
    return None


def _compressible_indices(pieces: Sequence[ShardedParameter], layers: Layers) -> list[int]:
    return [index for index, piece in enumerate(pieces) if is_compressible(piece.shape, piece.name, layers)]


def is_compressible(shape: Sequence[int], name: str, layers: Layers) -> bool:
    """Whether a gradient is compressed: it is a matrix, is large enough, and `layers` includes it."""
    if len(shape) < 2 or math.prod(shape) < MIN_COMPRESSED_ELEMENTS:
        return False
    if layers == "all":
        return True
    if layers == "non_attention":
        return not any(part.startswith("attention") or part in ("attn", "self_attn") for part in name.split("."))
    return any(fnmatchcase(name, pattern) for pattern in layers)
