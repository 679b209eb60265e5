"""The tensors of a Hugging Face folder by name and shape, the parameters of hpctrain's models that each of them holds,
and how an export distributes tensors over files. Pure.

Names are those that transformers gives to the tensors of LlamaForCausalLM, GPT2LMHeadModel, BertForMaskedLM and
T5ForConditionalGeneration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import SEGMENTS, DecoderSpec, EncoderSpec, FamilySpec, Gpt2Spec

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
    """Names of hpctrain's parameters in the tensor: one, or several of equal shape, which the tensor holds side by side
    along its last axis."""
    transposed: bool = False
    """Whether the tensor is a matrix [in, out], while hpctrain's parameter is [out, in]."""
    instead: str | None = None
    """Another name under which a folder may hold the tensor; None if there is none."""

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of each of hpctrain's parameters in the tensor; if the tensor is `transposed`, the axes are swapped
        back."""
        last = self.shape[-1] // len(self.parameters)
        return (last, *self.shape[:-1]) if self.transposed else (*self.shape[:-1], last)

    @property
    def count(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


def tensors_of(spec: FamilySpec) -> list[HfTensor]:
    """Return all tensors that a Hugging Face folder of the model has, in the model's order. A tied head is no tensor of
    its own."""
    match spec:
        case DecoderSpec():
            return list(_of_llama(spec))
        case Gpt2Spec():
            return list(_of_gpt2(spec))
        case EncoderSpec():
            return list(_of_bert(spec))
        case EncoderDecoderSpec():
            return list(_of_t5(spec))


def current_tensor_name(spec: FamilySpec, name: str) -> str:
    """Return the name that transformers today gives to the tensor `name` of a folder. Early folders lack the prefix of
    GPT-2's names, and call weight and bias of a norm gamma and beta."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    if isinstance(spec, Gpt2Spec) and name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"transformer.{name}"
    return name


def is_ignorable(spec: FamilySpec, name: str) -> bool:
    """Whether a tensor of a Hugging Face folder may be skipped. Such a tensor is a constant, is unused, is a second
    copy of a tied matrix, or is part of BERT's pooler or its head for sentence order, which hpctrain does not train."""
    return any(re.fullmatch(pattern, name) for pattern in _ignorable_patterns(spec))


def _ignorable_patterns(spec: FamilySpec) -> Iterator[str]:
    match spec:
        case DecoderSpec():
            yield r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
        case Gpt2Spec():
            yield r"transformer\.h\.\d+\.attn\.(masked_)?bias"
        case EncoderSpec():
            yield r"bert\.embeddings\.(position|token_type)_ids"
            yield r"bert\.pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
            if spec.tied:
                yield r"cls\.predictions\.decoder\.(weight|bias)"
        case EncoderDecoderSpec():
            yield r"(encoder|decoder)\.embed_tokens\.weight"
            # The first releases contain a table that no computation uses.
            yield r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    if spec.tied:
        yield r"lm_head\.weight"


def _of_llama(spec: DecoderSpec) -> Iterator[HfTensor]:
    dim, hidden, key_value = spec.dim, spec.hidden, spec.key_value_heads * spec.head_dim
    yield _same("model.embed_tokens.weight", "embedding.weight", spec.vocabulary, dim)
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        yield _same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", dim)
        for part, width in (("q", dim), ("k", key_value), ("v", key_value)):
            yield _same(f"{theirs}.self_attn.{part}_proj.weight", f"{ours}.attention.w{part}.weight", width, dim)
        yield _same(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.wo.weight", dim, dim)
        yield _same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward_norm.weight", dim)
        yield _same(f"{theirs}.mlp.gate_proj.weight", f"{ours}.feed_forward.w1.weight", hidden, dim)
        yield _same(f"{theirs}.mlp.up_proj.weight", f"{ours}.feed_forward.w3.weight", hidden, dim)
        yield _same(f"{theirs}.mlp.down_proj.weight", f"{ours}.feed_forward.w2.weight", dim, hidden)
    yield _same("model.norm.weight", "norm.weight", dim)
    if not spec.tied:
        yield _same("lm_head.weight", "head.weight", spec.vocabulary, dim)


def _of_gpt2(spec: Gpt2Spec) -> Iterator[HfTensor]:
    dim, hidden = spec.dim, spec.hidden
    yield _same("transformer.wte.weight", "embedding.weight", spec.vocabulary, dim)
    yield _same("transformer.wpe.weight", "positions.weight", spec.positions, dim)
    for layer in range(spec.layers):
        theirs, ours = f"transformer.h.{layer}", f"layers.{layer}"
        yield from _biased_norm(f"{theirs}.ln_1", f"{ours}.attention_norm", dim)
        for kind, shape in (("weight", (dim, 3 * dim)), ("bias", (3 * dim,))):
            parts = tuple(f"{ours}.attention.{part}.{kind}" for part in ("wq", "wk", "wv"))
            yield HfTensor(f"{theirs}.attn.c_attn.{kind}", shape, parts, transposed=kind == "weight")
        yield from _conv1d(f"{theirs}.attn.c_proj", f"{ours}.attention.wo", dim, dim)
        yield from _biased_norm(f"{theirs}.ln_2", f"{ours}.feed_forward_norm", dim)
        yield from _conv1d(f"{theirs}.mlp.c_fc", f"{ours}.feed_forward.w1", dim, hidden)
        yield from _conv1d(f"{theirs}.mlp.c_proj", f"{ours}.feed_forward.w2", hidden, dim)
    yield from _biased_norm("transformer.ln_f", "norm", dim)
    if not spec.tied:
        yield _same("lm_head.weight", "head.weight", spec.vocabulary, dim)


def _of_bert(spec: EncoderSpec) -> Iterator[HfTensor]:
    dim, hidden, tables = spec.dim, spec.hidden, "bert.embeddings"
    yield _same(f"{tables}.word_embeddings.weight", "embedding.weight", spec.vocabulary, dim)
    yield _same(f"{tables}.position_embeddings.weight", "positions.weight", spec.positions, dim)
    yield _same(f"{tables}.token_type_embeddings.weight", "segments.weight", SEGMENTS, dim)
    yield from _biased_norm(f"{tables}.LayerNorm", "embedding_norm", dim)
    for layer in range(spec.layers):
        theirs, ours = f"bert.encoder.layer.{layer}", f"layers.{layer}"
        for part, name in (("query", "wq"), ("key", "wk"), ("value", "wv")):
            yield from _linear(f"{theirs}.attention.self.{part}", f"{ours}.attention.{name}", dim, dim)
        yield from _linear(f"{theirs}.attention.output.dense", f"{ours}.attention.wo", dim, dim)
        yield from _biased_norm(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm", dim)
        yield from _linear(f"{theirs}.intermediate.dense", f"{ours}.feed_forward.w1", dim, hidden)
        yield from _linear(f"{theirs}.output.dense", f"{ours}.feed_forward.w2", hidden, dim)
        yield from _biased_norm(f"{theirs}.output.LayerNorm", f"{ours}.feed_forward_norm", dim)
    head = "cls.predictions"
    yield from _linear(f"{head}.transform.dense", "transform", dim, dim)
    yield from _biased_norm(f"{head}.transform.LayerNorm", "transform_norm", dim)
    # Two names of one bias; where the values differ, transformers adds the decoder's.
    biases = (f"{head}.bias", f"{head}.decoder.bias")
    if not spec.tied:
        yield _same(f"{head}.decoder.weight", "head.weight", spec.vocabulary, dim)
        yield HfTensor(biases[1], (spec.vocabulary,), ("head.bias",), instead=biases[0])
    yield HfTensor(biases[0], (spec.vocabulary,), ("head.bias",), instead=biases[1])


def _of_t5(spec: EncoderDecoderSpec) -> Iterator[HfTensor]:
    dim = spec.dim
    yield _same("shared.weight", "embedding.weight", spec.vocabulary, dim)
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
        yield HfTensor("lm_head.weight", (spec.vocabulary, dim), ("head.weight",), instead="shared.weight")


def _unscaled(spec: EncoderDecoderSpec, theirs: str, ours: str) -> Iterator[HfTensor]:
    for part in "qkv":
        yield _same(f"{theirs}.{part}.weight", f"{ours}.w{part}.weight", spec.inner, spec.dim)
    yield _same(f"{theirs}.o.weight", f"{ours}.wo.weight", spec.dim, spec.inner)


def _same(theirs: str, ours: str, *shape: int) -> HfTensor:
    return HfTensor(theirs, shape, (ours,))


def _biased_norm(theirs: str, ours: str, dim: int) -> Iterator[HfTensor]:
    for kind in ("weight", "bias"):
        yield _same(f"{theirs}.{kind}", f"{ours}.{kind}", dim)


def _linear(theirs: str, ours: str, width_in: int, width_out: int) -> Iterator[HfTensor]:
    yield _same(f"{theirs}.weight", f"{ours}.weight", width_out, width_in)
    yield _same(f"{theirs}.bias", f"{ours}.bias", width_out)


def _conv1d(theirs: str, ours: str, width_in: int, width_out: int) -> Iterator[HfTensor]:
    """Yield weight and bias of one GPT-2 linear layer. The folder holds its matrix as [in, out], hpctrain as [out, in].

    Args:
        theirs: name of the layer in the Hugging Face folder.
        ours: name of the layer in hpctrain's model.
    """
    yield HfTensor(f"{theirs}.weight", (width_in, width_out), (f"{ours}.weight",), transposed=True)
    yield _same(f"{theirs}.bias", f"{ours}.bias", width_out)


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


def assign_to_shards(tensors: Sequence[HfTensor], bytes_per_value: int, limit: int) -> dict[str, list[HfTensor]]:
    """Return file name -> tensors of an export's files, in the order of `tensors`. A file is larger than `limit` bytes
    only if a single tensor is."""
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
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def index_of(files: dict[str, list[HfTensor]], bytes_per_value: int) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json, which says in which file each tensor is.

    Args:
        files: file name -> tensors, from `assign_to_shards`.
    """
    total = sum(tensor.count for group in files.values() for tensor in group)
    return {
        "metadata": {"total_parameters": total, "total_size": total * bytes_per_value},
        "weight_map": {tensor.name: name for name, group in files.items() for tensor in group},
    }
