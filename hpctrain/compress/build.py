"""From a plan's codec to the reducer of a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
import torch.distributed as dist

from hpctrain.compress.codecs.values import ValueCode
from hpctrain.compress.collectives.dense_scatter import DenseScatter
from hpctrain.compress.collectives.feedback import Feedback, Reset
from hpctrain.compress.collectives.scatter import Piece, Scatter, Unsent
from hpctrain.compress.collectives.scatter_steps import ScatterSteps
from hpctrain.compress.reducers.bf16 import Bf16Wire
from hpctrain.compress.reducers.low_rank import PowerSgdReducer, PowerSgdSettings
from hpctrain.compress.reducers.quantized import QuantizedWire
from hpctrain.compress.reducers.quantized_scatter import QuantizedScatter, UnsentParts
from hpctrain.compress.reducers.reduce_scatter_all_gather import OwnerReducer
from hpctrain.compress.reducers.reducer import DenseReducer, Reducer
from hpctrain.compress.reducers.sparse import SparseReducer, SparseSettings
from hpctrain.compress.reducers.sparse_scatter import SparseScatter
from hpctrain.compress.reducers.tagc import TagcReducer, TagcSettings
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.compress.select.sparse_counts import AdaptiveCounts, AdaptiveSettings, Counts, FixedCounts
from hpctrain.records.plan.codec import CodecSpec
from hpctrain.records.plan.compression import (
    SMALLEST_NUMBERS,
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

Compressing = Bf16 | Quantized | TopK | Adaptive | Tagc | PowerSgd


def build_reducer(
    group: dist.ProcessGroup, names: Sequence[str], shapes: Sequence[torch.Size], spec: CodecSpec
) -> Reducer:
    """The reducer of gradients with these names and shapes, in this order.

    Args:
        group: the ranks whose gradients are summed.
        names: of the parameters, as 'layers.3.attention.wq.weight'.
        shapes: of what this rank holds of them.
    """
    codec = spec.codec
    if isinstance(codec, NoCompression | LocalSteps) or dist.get_world_size(group) == 1:
        return DenseReducer(group)
    chosen = [
        index
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
        if eligible(shape, name, codec.layers)
    ]
    if not chosen:
        return DenseReducer(group)
    return _compressing(group, chosen, codec)


def _compressing(group: dist.ProcessGroup, chosen: list[int], codec: Compressing) -> Reducer:
    match codec:
        case Bf16():
            return OwnerReducer(group, chosen, Bf16Wire())
        case Quantized():
            return OwnerReducer(group, chosen, QuantizedWire(codec.bits))
        case TopK() | Adaptive():
            counts = _counts(codec, group, len(chosen))
            feedback = _feedback(codec, codec.reset, codec.reset_every)
            return SparseReducer(group, chosen, counts, feedback, _choice(codec))
        case Tagc():
            sketch = TagcSettings(codec.density, codec.ratio, codec.warmup_steps)
            return TagcReducer(group, chosen, sketch, _feedback(codec), select_with_values)
        case PowerSgd():
            products = PowerSgdSettings(codec.rank, codec.warmup_steps, codec.min_compression)
            return PowerSgdReducer(group, chosen, products)


def _counts(codec: TopK | Adaptive, group: dist.ProcessGroup, layers: int) -> Counts:
    if isinstance(codec, TopK):
        return FixedCounts(group, codec.density, codec.warmup_steps)
    settings = AdaptiveSettings(codec.limits, codec.mapping, codec.form, codec.warmup_steps, codec.reprofile_every)
    return AdaptiveCounts(group, layers, settings)


def _feedback(codec: TopK | Adaptive | Tagc, reset: Reset = "none", reset_every: int = 1) -> Feedback:
    dtype = torch.float32 if codec.residual == "fp32" else torch.bfloat16
    return Feedback(codec.feedback, beta=codec.beta, reset=reset, reset_every=reset_every, dtype=dtype)


def _choice(codec: TopK | Adaptive) -> SparseSettings:
    return SparseSettings(codec.selector, ValueCode[codec.values.upper()])


def build_scatters(
    spec: CodecSpec, parts: Sequence[Sequence[Piece]], group: dist.ProcessGroup, device_type: str
) -> list[Scatter | None]:
    """What sums the gradients of each of these parts of a sharded stage; None: torch's own reduce-scatter.

    Args:
        parts: the parameters of each, in the order in which they stand in its flat gradient.
        group: the ranks that share the state.
    """
    match spec.codec:
        case TopK() | Adaptive():
            return _sparse_scatters(spec.codec, parts, group, device_type)
        case Quantized():
            return _quantized_scatters(spec.codec, parts, device_type)
        case Bf16():
            return [DenseScatter(torch.bfloat16)] * len(parts)
    return [_exact(device_type)] * len(parts)


def _exact(device_type: str) -> Scatter | None:
    # NCCL has a reduce-scatter that sends each number once; gloo has not.
    return DenseScatter() if device_type == "cpu" else None


def _sparse_scatters(
    codec: TopK | Adaptive, parts: Sequence[Sequence[Piece]], group: dist.ProcessGroup, device_type: str
) -> list[Scatter | None]:
    chosen = [_eligible_pieces(pieces, codec.layers) for pieces in parts]
    firsts = list(accumulate((len(indices) for indices in chosen), initial=0))
    sizes = [math.prod(pieces[index].shape) for pieces, indices in zip(parts, chosen, strict=True) for index in indices]
    steps = ScatterSteps(sizes, _counts(codec, group, len(sizes)), _feedback(codec, codec.reset, codec.reset_every))
    return [
        SparseScatter(pieces, indices, first, steps, _choice(codec)) if indices else _exact(device_type)
        for pieces, indices, first in zip(parts, chosen, firsts, strict=False)
    ]


def _quantized_scatters(codec: Quantized, parts: Sequence[Sequence[Piece]], device_type: str) -> list[Scatter | None]:
    unsent = UnsentParts(codec.bits)
    return [
        QuantizedScatter(pieces, indices, number, unsent) if indices else _exact(device_type)
        for number, pieces in enumerate(parts)
        for indices in [_eligible_pieces(pieces, codec.layers)]
    ]


def unsent_of(scatters: Sequence[Scatter | None]) -> Unsent | None:
    """What the scatters of a stage have not sent, where there are any that keep something back."""
    for scatter in scatters:
        if isinstance(scatter, SparseScatter):
            return scatter.steps
        if isinstance(scatter, QuantizedScatter):
            return scatter.unsent
    return None


def _eligible_pieces(pieces: Sequence[Piece], layers: Layers) -> list[int]:
    return [index for index, piece in enumerate(pieces) if eligible(piece.shape, piece.name, layers)]


def eligible(shape: Sequence[int], name: str, layers: Layers) -> bool:
    """Whether a gradient may be compressed: matrices of some size, among the layers that are to be."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST_NUMBERS:
        return False
    if layers == "all":
        return True
    if layers == "non_attention":
        return not any(part.startswith("attention") or part in ("attn", "self_attn") for part in name.split("."))
    return any(fnmatchcase(name, pattern) for pattern in layers)
