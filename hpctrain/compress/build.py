"""Builds what sums a rank's gradients with the plan's codec: a reducer, or reduce-scatters if the state is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
import torch.distributed as dist

from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.codecs.indexed_numbers import IndexedCode
from hpctrain.compress.codecs.integers import BlockCode, IntegerCode
from hpctrain.compress.codecs.rotated_integers import RotatedIntegerCode
from hpctrain.compress.codecs.sparse_message import ValueCode
from hpctrain.compress.collectives.reduce_scatter import DenseReduceScatter, ReduceScatter, ShardedParameter
from hpctrain.compress.collectives.sparse_state import ErrorFeedback, SparseSettings, SparseState
from hpctrain.compress.reducers.power_sgd import PowerSgdReducer
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.quantized_reduce_scatter import QuantizedReduceScatter, QuantizedStage
from hpctrain.compress.reducers.reduce_scatter_all_gather import Bf16BucketCodec, BucketCodec, ReduceScatterAllGather
from hpctrain.compress.reducers.reducer import DenseReducer, Reducer
from hpctrain.compress.reducers.sparse import SparseReducer
from hpctrain.compress.reducers.sparse_reduce_scatter import SparseReduceScatter
from hpctrain.compress.reducers.tagc import TagcReducer
from hpctrain.compress.reducers.tagc_reduce_scatter import TagcReduceScatter
from hpctrain.compress.select.sparse_counts import AdaptiveSendCounts, SendCounts
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import (
    MIN_COMPRESSED_ELEMENTS,
    Adaptive,
    Bf16,
    Codec,
    Mixed,
    NoCompression,
    Reset,
    Tagc,
    TopK,
)
from hpctrain.records.plan.gradient_codec import Layers
from hpctrain.records.plan.integers import Quantized
from hpctrain.records.plan.layer_groups import in_attention, layer_group
from hpctrain.records.plan.local_sgd import LocalSteps
from hpctrain.records.plan.low_rank import PowerSgd
from hpctrain.records.plan.rotated import RotatedIntegers


def build_reducer(
    group: dist.ProcessGroup, names: Sequence[str], shapes: Sequence[torch.Size], spec: CodecSpec
) -> Reducer:
    """Return the reducer that sums gradients over the ranks of `group` with a plan's codec.

    Args:
        group: the replicas.
        names: names of the parameters, as 'layers.3.attention.wq.weight', in the order of the gradients.
        shapes: shapes of this rank's parts of the parameters, in the order of the gradients.
        spec: the codec and its settings.
    """
    codec = spec.codec
    chosen = [
        index for index, (name, shape) in enumerate(zip(names, shapes, strict=True)) if compresses(codec, shape, name)
    ]
    if not chosen or dist.get_world_size(group) == 1:
        return DenseReducer(group)
    match codec:
        case NoCompression() | LocalSteps():
            return DenseReducer(group)
        case Bf16() | Quantized() | RotatedIntegers():
            return ReduceScatterAllGather(group, dict.fromkeys(chosen, _bucket_codec(codec)))
        case Mixed():
            codecs = {group: _bucket_codec(one) for group, one in codec.codecs.items()}
            return ReduceScatterAllGather(group, {index: codecs[layer_group(names[index])] for index in chosen})
        case TopK() | Adaptive():
            state = _sparse_state(codec, group, chosen, [math.prod(shapes[index]) for index in chosen])
            return SparseReducer(group, state, _sparse_settings(codec))
        case Tagc():
            return TagcReducer(group, chosen, codec, _feedback(codec))
        case PowerSgd():
            return PowerSgdReducer(group, chosen, codec)


def compresses(codec: Codec, shape: Sequence[int], name: str) -> bool:
    """Return whether a codec sends the gradient of a parameter, as `is_compressible` describes."""
    if isinstance(codec, Mixed):
        return any(is_compressible(shape, name, group) for group in codec.codecs)
    return is_compressible(shape, name, getattr(codec, "layers", "all"))


def _bucket_codec(codec: Bf16 | Quantized | RotatedIntegers) -> BucketCodec:
    if isinstance(codec, Bf16):
        return Bf16BucketCodec()
    return QuantizedBucketCodec(build_block_code(codec), codec.has_state)


def build_block_code(codec: Quantized | RotatedIntegers) -> BlockCode:
    """Return the code that writes and reads the messages of a codec of integers."""
    return IntegerCode(codec.bits) if isinstance(codec, Quantized) else RotatedIntegerCode(codec.bits, codec.seed)


def _sparse_state(
    codec: TopK | Adaptive | Tagc, group: dist.ProcessGroup, positions: Sequence[int], sizes: Sequence[int]
) -> SparseState:
    counts = (
        AdaptiveSendCounts(group, len(sizes), codec)
        if isinstance(codec, Adaptive)
        else SendCounts(group, codec.density, codec.warmup_steps)
    )
    feedback = _feedback(codec) if isinstance(codec, Tagc) else _feedback(codec, codec.reset, codec.reset_every)
    return SparseState(positions, sizes, counts, feedback)


def _feedback(codec: TopK | Adaptive | Tagc, reset: Reset = "none", reset_every: int = 1) -> ErrorFeedback:
    dtype = torch.float32 if codec.residual == "fp32" else torch.bfloat16
    return ErrorFeedback(codec.feedback, beta=codec.beta, reset=reset, reset_every=reset_every, dtype=dtype)


def _sparse_settings(codec: TopK | Adaptive) -> SparseSettings:
    return SparseSettings(codec.selector, ValueCode[codec.values.upper()])


def build_reduce_scatters(
    spec: CodecSpec,
    parts: Sequence[Sequence[ShardedParameter]],
    group: dist.ProcessGroup,
    device_type: str,
) -> list[ReduceScatter | None]:
    """Return the reduce-scatter of each `fully_shard` module of a sharded stage; None stands for torch's own
    reduce-scatter.

    Args:
        spec: the codec and its settings.
        parts: for each `fully_shard` module, its parameters in the order of its flat gradient.
        group: the ranks over which the state is sharded.
        device_type: type of the stage's device, as 'cpu'.

    Raises:
        ValueError: the codec cannot sum the gradients of a sharded state.
    """
    codec, pool = spec.codec, BufferPool(bounded=True)

    def exact() -> ReduceScatter | None:
        # gloo's own reduce-scatter sends each number twice; NCCL's sends it once.
        return DenseReduceScatter(pool=pool) if device_type == "cpu" else None

    match codec:
        case NoCompression():
            return [exact() for _ in parts]
        case Bf16():
            return [DenseReduceScatter(torch.bfloat16, pool) for _ in parts]
        case Quantized() | RotatedIntegers():
            shared = QuantizedStage(build_block_code(codec), codec.has_state)
            return [
                QuantizedReduceScatter(pieces, indices, number, shared) if indices else exact()
                for number, pieces in enumerate(parts)
                for indices in [_compressible_indices(pieces, codec.layers)]
            ]
        case TopK() | Adaptive() | Tagc():
            return _sparse_reduce_scatters(codec, parts, group, exact)
        case PowerSgd() | LocalSteps() | Mixed():
            raise ValueError(f"compression {codec.mode} cannot sum the gradients of a sharded state")


def _sparse_reduce_scatters(
    codec: TopK | Adaptive | Tagc,
    parts: Sequence[Sequence[ShardedParameter]],
    group: dist.ProcessGroup,
    exact: Callable[[], ReduceScatter | None],
) -> list[ReduceScatter | None]:
    chosen = [_compressible_indices(pieces, codec.layers) for pieces in parts]
    pairs = list(zip(parts, chosen, strict=True))
    sizes = [math.prod(pieces[index].shape) for pieces, indices in pairs for index in indices]
    state = _sparse_state(codec, group, range(len(sizes)), sizes)
    firsts = accumulate((len(indices) for indices in chosen), initial=0)
    scatters: list[ReduceScatter | None] = []
    for (pieces, indices), first in zip(pairs, firsts, strict=False):
        if not indices:
            scatters.append(exact())
        elif isinstance(codec, Tagc):
            code = IndexedCode(codec.ratio, codec.index)
            scatters.append(TagcReduceScatter(pieces, indices, first, state, code))
        else:
            scatters.append(SparseReduceScatter(pieces, indices, first, state, _sparse_settings(codec)))
    return scatters


def _compressible_indices(pieces: Sequence[ShardedParameter], layers: Layers) -> list[int]:
    return [index for index, piece in enumerate(pieces) if is_compressible(piece.shape, piece.name, layers)]


def is_compressible(shape: Sequence[int], name: str, layers: Layers) -> bool:
    """Return whether the codec sends the gradient of a parameter: it has at least two dimensions and
    `MIN_COMPRESSED_ELEMENTS` numbers, and the codec's setting `layers` includes the parameter's `name`.
    """
    if len(shape) < 2 or math.prod(shape) < MIN_COMPRESSED_ELEMENTS:
        return False
    if layers == "all":
        return True
    if layers == "non_attention":
        return not in_attention(name)
    if layers == "non_attention_linear":
        return not in_attention(name) or any(part in _ATTENTION_OUTPUTS for part in name.split("."))
    if isinstance(layers, str):
        return layers == layer_group(name)
    return any(fnmatchcase(name, pattern) for pattern in layers)


_ATTENTION_OUTPUTS = frozenset({"wo", "o_proj", "out_proj", "c_proj", "dense", "o", "proj"})
"""Names of the projection after an attention: in hpctrain's own models, in Llama, OPT, GPT-2, GPT-NeoX and BERT, T5,
and vision models."""
