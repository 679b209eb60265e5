"""The tensors of a Hugging Face folder by name and shape, the parameters of hpctrain's models that each of them holds,
and how an export distributes tensors over files. Pure.

The names of a class of transformers are in its row of the table of architectures (`architectures.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.hf.parameter_shapes import parameter_shapes
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, Gpt2Spec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Name of an export's only file with tensors, and of the file that says in which of several files each tensor is."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Type of an export's numbers -> bytes of a number."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True)
class HfTensor:
    """Name and shape of one tensor of a Hugging Face folder, and the parameters of hpctrain's model in it."""

    name: str
    shape: tuple[int, ...]
    parameters: tuple[str, ...]
    """Names of hpctrain's parameters in the tensor: one, or several that it holds one after the other along `axis`."""
    transposed: bool = False
    """Whether the tensor is a matrix [in, out], while hpctrain's parameter is [out, in]."""
    instead: tuple[str, ...] = ()
    """Other names under which a folder may hold the tensor, as the name of a tied head."""
    groups: int = 1
    """Number of equal parts of the tensor along `axis`, each of which holds a part of every parameter: 1, or the number
    of heads where queries, keys and values of each head lie together."""
    widths: tuple[int, ...] = ()
    """Length of each parameter along `axis`, if there are several."""

    @property
    def axis(self) -> int:
        """Axis along which the tensor holds several parameters: that of a matrix's output."""
        return len(self.shape) - 1 if self.transposed else 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Part [from, to) of each parameter along `axis`, if `groups` is 1. With more groups, each group holds
        1/`groups` of every part, in the same order."""
        ends = list(accumulate(self.widths or (self.shape[self.axis],)))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def count(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


ModuleNames = Mapping[str, str | tuple[str, ...]]
"""Module of transformers -> module of hpctrain, or the modules that it holds."""


@dataclass(frozen=True)
class TensorNames:
    """The names of an architecture's tensors, as a table of modules. A module's tensors are called like the module,
    with the ending `.weight` or `.bias`."""

    modules: ModuleNames
    """Module of transformers -> module of hpctrain, or the modules that it holds one after the other along the axis of
    the output; {} stands for the number of a block. Modules that a model lacks are skipped."""
    transposed: tuple[str, ...] = ()
    """Modules of transformers whose matrix is [in, out]."""
    by_head: tuple[str, ...] = ()
    """Modules of transformers that hold queries, keys and values of the first head, then those of the next head, and so
    on."""

    def __call__(self, spec: DecoderSpec | Gpt2Spec) -> Iterator[HfTensor]:
        """Yield the tensors of a model in the model's order.

        Raises:
            KeyError: a parameter of the model has no name here.
        """
        shapes = parameter_shapes(spec)
        holders: dict[str, tuple[str, tuple[str, ...]]] = {}
        for theirs, ours in self.modules.items():
            parts = (ours,) if isinstance(ours, str) else ours
            holders |= dict.fromkeys(parts, (theirs, parts))
        # A folder may hold a tied matrix twice, or under the name of the head.
        tied = {} if "head.weight" in shapes else {"embedding.weight": (f"{holders['head'][0]}.weight",)}
        done: set[str] = set()
        for name in shapes:
            module, _, kind = name.rpartition(".")
            number = next((part for part in module.split(".") if part.isdigit()), "")
            theirs, modules = holders[re.sub(r"\.\d+\.", ".{}.", module, count=1)]
            parts = tuple(f"{part.format(number)}.{kind}" for part in modules)
            if name in done:
                continue
            done.update(parts)
            widths = tuple(shapes[part][0] for part in parts)
            shape = (sum(widths), *shapes[name][1:])
            transposed = kind == "weight" and theirs in self.transposed
            yield HfTensor(
                f"{theirs.format(number)}.{kind}", shape[::-1] if transposed else shape, parts, transposed,
                groups=spec.heads if theirs in self.by_head else 1, widths=widths if len(parts) > 1 else (),
                instead=tied.get(name, ()),
            )  # fmt: skip


@dataclass(frozen=True)
class EncoderNames:
    """The names of the tensors of a BERT or RoBERTa, as far as the two differ."""

    body: str
    """Prefix of all names but those of the head."""
    head: str
    """Prefix of the names of the head."""
    transform: str
    """Name of the head's matrix, after the prefix."""
    transform_norm: str
    """Name of the head's norm, after the prefix."""

    def __call__(self, spec: EncoderSpec) -> Iterator[HfTensor]:
        """Yield the tensors of a model in the model's order."""
        dim, hidden, head, tables = spec.dim, spec.hidden, self.head, f"{self.body}.embeddings"
        yield HfTensor(
            f"{tables}.word_embeddings.weight", (spec.vocabulary, dim), ("embedding.weight",),
            instead=(f"{head}.decoder.weight",) * spec.tied,
        )  # fmt: skip
        yield _same(f"{tables}.position_embeddings.weight", "positions.weight", spec.position_rows, dim)
        yield _same(f"{tables}.token_type_embeddings.weight", "segments.weight", spec.segments, dim)
        yield from _biased(f"{tables}.LayerNorm", "embedding_norm", dim)
        for layer in range(spec.layers):
            theirs, ours = f"{self.body}.encoder.layer.{layer}", f"layers.{layer}"
            for part, name in (("query", "wq"), ("key", "wk"), ("value", "wv")):
                yield from _biased(f"{theirs}.attention.self.{part}", f"{ours}.attention.{name}", dim, dim)
            yield from _biased(f"{theirs}.attention.output.dense", f"{ours}.attention.wo", dim, dim)
            yield from _biased(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm", dim)
            yield from _biased(f"{theirs}.intermediate.dense", f"{ours}.feed_forward.w1", hidden, dim)
            yield from _biased(f"{theirs}.output.dense", f"{ours}.feed_forward.w2", dim, hidden)
            yield from _biased(f"{theirs}.output.LayerNorm", f"{ours}.feed_forward_norm", dim)
        yield from _biased(f"{head}.{self.transform}", "transform", dim, dim)
        yield from _biased(f"{head}.{self.transform_norm}", "transform_norm", dim)
        # Two names of one bias; where the values differ, transformers adds the decoder's.
        biases = (f"{head}.bias", f"{head}.decoder.bias")
        if not spec.tied:
            yield _same(f"{head}.decoder.weight", "head.weight", spec.vocabulary, dim)
            yield HfTensor(biases[1], (spec.vocabulary,), ("head.bias",), instead=(biases[0],))
        yield HfTensor(biases[0], (spec.vocabulary,), ("head.bias",), instead=(biases[1],))


def t5_tensors(spec: EncoderDecoderSpec) -> Iterator[HfTensor]:
    """Yield the tensors of a T5 in the model's order."""
    dim = spec.dim
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *["lm_head.weight"] * spec.tied)
    yield HfTensor("shared.weight", (spec.vocabulary, dim), ("embedding.weight",), instead=copies)
    for layer in range(spec.layers):
        decoder = layer >= spec.seam
        side, number = ("decoder", layer - spec.seam) if decoder else ("encoder", layer)
        theirs, ours = f"{side}.block.{number}.layer", f"layers.{layer}"
        yield from _unscaled(spec, f"{theirs}.0.SelfAttention", f"{ours}.attention")
        if number == 0:
            table = f"{theirs}.0.SelfAttention.relative_attention_bias.weight"
            yield _same(table, f"relative_{side}.weight", spec.buckets, spec.heads)
        yield _same(f"{theirs}.0.layer_norm.weight", f"{ours}.attention_norm.weight", dim)
        if decoder:
            yield from _unscaled(spec, f"{theirs}.1.EncDecAttention", f"{ours}.cross_attention")
            yield _same(f"{theirs}.1.layer_norm.weight", f"{ours}.cross_attention_norm.weight", dim)
        last = 2 if decoder else 1
        dense, feed = f"{theirs}.{last}.DenseReluDense", f"{ours}.feed_forward"
        linears = (("wi_0", "w1"), ("wi_1", "w3")) if spec.gated else (("wi", "w1"),)
        for part, name in linears:
            yield _same(f"{dense}.{part}.weight", f"{feed}.{name}.weight", spec.hidden, dim)
        yield _same(f"{dense}.wo.weight", f"{feed}.w2.weight", dim, spec.hidden)
        yield _same(f"{theirs}.{last}.layer_norm.weight", f"{ours}.feed_forward_norm.weight", dim)
    yield _same("encoder.final_layer_norm.weight", "encoder_norm.weight", dim)
    yield _same("decoder.final_layer_norm.weight", "norm.weight", dim)
    if not spec.tied:
        # transformers 5 writes a head that equals the embedding once, though the two are scaled differently.
        yield HfTensor("lm_head.weight", (spec.vocabulary, dim), ("head.weight",), instead=("shared.weight",))


def _unscaled(spec: EncoderDecoderSpec, theirs: str, ours: str) -> Iterator[HfTensor]:
    for part in "qkv":
        yield _same(f"{theirs}.{part}.weight", f"{ours}.w{part}.weight", spec.inner, spec.dim)
    yield _same(f"{theirs}.o.weight", f"{ours}.wo.weight", spec.dim, spec.inner)


def _same(theirs: str, ours: str, *shape: int) -> HfTensor:
    return HfTensor(theirs, shape, (ours,))


def _biased(theirs: str, ours: str, *shape: int) -> Iterator[HfTensor]:
    """Yield the weight of this shape and the bias of a norm or a linear layer."""
    yield _same(f"{theirs}.weight", f"{ours}.weight", *shape)
    yield _same(f"{theirs}.bias", f"{ours}.bias", shape[0])


def shard_bytes(text: str) -> int:
    """Return the number of bytes that a text such as '5GB' or '500MiB' stands for.

    Raises:
        InputError: the text is no size.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    size = int(float(parts[1]) * _UNITS.get(parts[2].upper(), 0)) if parts else 0
    if size < 1:
        raise InputError(f"--max-shard-size {text}: allowed: a number with KB, MB, GB, KiB, MiB or GiB, as 5GB")
    return size


def assign_to_shards(tensors: Iterable[HfTensor], bytes_per_value: int, limit: int) -> dict[str, list[HfTensor]]:
    """Return file name -> tensors of an export's files, in the order of `tensors`. The tensors of a file have at most
    `limit` bytes together; a larger tensor has a file of its own."""
    groups: list[list[HfTensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.count * bytes_per_value
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def index_of(files: dict[str, list[HfTensor]], size_bytes: int) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json, which says in which file each tensor is.

    Args:
        files: file name -> tensors, from `assign_to_shards`.
        size_bytes: bytes of all tensors together.
    """
    total = sum(tensor.count for group in files.values() for tensor in group)
    return {
        "metadata": {"total_parameters": total, "total_size": size_bytes},
        "weight_map": {tensor.name: name for name, group in files.items() for tensor in group},
    }
