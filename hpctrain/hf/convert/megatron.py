"""Checkpoints of Megatron-Core's GPTModel: a Llama, a Qwen 2 (biases of queries, keys and values), a Qwen 3 (norms of
queries and keys), or a GPT-2 (a table of positions).

One matrix holds queries, keys and values of all heads, group by group: the queries of the group, its keys, its values.
With a gate, the matrix of the first feed-forward layer holds the gate above the other half.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.hf.convert.layout import (
    LLAMA_KEYS,
    ModelTensors,
    are_equal,
    changed,
    concatenated,
    first_rows,
    parts_of,
    size,
    transposed,
)
from hpctrain.hf.convert.torch_file import Bits, LazyTensor

KNOWN = "embedding.word_embeddings.weight"
_POSITIONS = "embedding.position_embeddings.weight"
_STACKED = re.compile(r"decoder\.layers\.(?=[a-z])")
_LAYERS_MAX = 4096
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms that Transformer Engine computes together with the next matrix -> names of norms of their own."""

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
    "num_experts": (None,),
    "mtp_num_layers": (None, 0),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False,),
}
"""Megatron-LM's arguments -> the values with which the model is one of the four that this module converts."""
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "kv_channels": ("head_dim",),
    "num_query_groups": ("num_key_value_heads",),
}
"""Megatron-LM's arguments -> the keys of config.json with which they must agree. The keys' values follow from the
tensors."""
ARGUMENTS = (
    *_ARGUMENTS, *_SIZES, "num_attention_heads", "group_query_attention", "norm_epsilon", "rotary_base",
    "max_position_embeddings", "use_rope_scaling", "rope_scaling_factor", "hidden_dropout", "attention_dropout",
    "bias_gelu_fusion", "openai_gelu",
)  # fmt: skip
"""Megatron-LM's arguments that are read."""


class MegatronLayout:
    """The tensors of Megatron-Core's GPTModel in a checkpoint."""

    tool = "Megatron's GPT"
    may_shrink: tuple[str, ...] = ("vocab_size",)

    def __init__(self, model: ModelTensors, arguments: Mapping[str, Any]) -> None:
        """Read the tensors under the same names for every version of Megatron-Core: one tensor per layer, and norms
        with names of their own.

        Args:
            model: the tensors; one tensor may hold those of all layers.
            arguments: Megatron-LM's arguments of the training, by name; empty if the checkpoint has none.

        Raises:
            FileError: an argument has a value that no model of hpctrain has, or a tensor holds more than 4096 layers.
        """
        self._model = ModelTensors(model.source, dict(_by_layer(model)))
        self._arguments = arguments
        self._is_gpt2 = _POSITIONS in self._model.by_name
        self.needed: tuple[str, ...] = LLAMA_KEYS
        if self._is_gpt2:
            self.needed = ("n_head", "layer_norm_epsilon", "activation_function")
        wrong = [
            FieldError(f"args.{name}", f"found {arguments[name]!r:.60}; allowed: {', '.join(map(str, allowed))}")
            for name, allowed in _ARGUMENTS.items()
            if name in arguments and arguments[name] not in allowed
        ]
        if wrong:
            raise FileError(model.source, wrong)

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that follow from the shapes of the tensors and from Megatron-LM's arguments of
        the training.

        Args:
            given: keys of config.json that the user gave. Of these, only the number of attention heads is used: for a
                Llama, Qwen 2 or Qwen 3 whose arguments lack it.

        Raises:
            FileError: a tensor is missing, or has a shape that does not fit another tensor, the arguments, or the
                number of attention heads.
        """
        config = self._gpt2_config() if self._is_gpt2 else self._llama_config(given)
        # Without group_query_attention, Megatron-LM does not use num_query_groups, and leaves its default there.
        ignored = () if self._arguments.get("group_query_attention") else ("num_query_groups",)
        wrong = [
            FieldError(f"args.{name}", f"found {self._arguments[name]!r:.60}; the tensors have {config[key]}")
            for name, keys in _SIZES.items()
            for key in keys
            if key in config and name not in ignored and self._arguments.get(name) not in (None, config[key])
        ]
        if wrong:
            raise FileError(self._model.source, wrong)
        return config

    def tensors(self, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        """Return the tensors of the Hugging Face folder. Rows of the embedding beyond the vocabulary, which Megatron
        adds to divide it evenly, are cut off.

        Raises:
            FileError: tensors are missing, or there are others than those of the model.
        """
        rows = self._model[KNOWN].shape[0]
        vocabulary = min(rows, size(config, "vocab_size", self._model.source))
        made = dict(self._gpt2_tensors(config) if self._is_gpt2 else self._llama_tensors(config))
        for name, tensor in made.items():
            if name.rpartition(".")[0].endswith(("embed_tokens", "wte", "lm_head")):
                made[name] = first_rows(tensor, vocabulary)
        self._model.check_all_used(self.tool, "output_layer.weight")
        return made

    def _llama_config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        model, arguments = self._model, self._arguments
        name, kind = "LlamaForCausalLM", "llama"
        if "decoder.layers.0.self_attention.linear_qkv.bias" in model.by_name:
            name, kind = "Qwen2ForCausalLM", "qwen2"
        elif "decoder.layers.0.self_attention.q_layernorm.weight" in model.by_name:
            name, kind = "Qwen3ForCausalLM", "qwen3"
        config = {"architectures": [name], "model_type": kind, "intermediate_size": self._gated_width()}
        config |= self._shared_sizes("hidden_size", "num_hidden_layers")
        config |= self._stated(
            num_attention_heads="num_attention_heads", rms_norm_eps="norm_epsilon", rope_theta="rotary_base",
            max_position_embeddings="max_position_embeddings",
        )  # fmt: skip
        if "use_rope_scaling" in arguments:
            config["rope_scaling"] = None
            if arguments["use_rope_scaling"]:
                config["rope_scaling"] = {
                    "rope_type": "llama3",
                    "factor": arguments.get("rope_scaling_factor", 8.0),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
        if "num_attention_heads" in (heads := {**given, **config}):
            config |= self._head_sizes(size(heads, "num_attention_heads", model.source))
        return config

    def _gpt2_config(self) -> dict[str, Any]:
        model, arguments = self._model, self._arguments
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": model.matrix(_POSITIONS).shape[0],
            "n_inner": model.matrix("decoder.layers.0.mlp.linear_fc1.weight").shape[0],
            "resid_pdrop": arguments.get("hidden_dropout", 0.0),
            "embd_pdrop": arguments.get("hidden_dropout", 0.0),
            "attn_pdrop": arguments.get("attention_dropout", 0.0),
        }
        config |= self._shared_sizes("n_embd", "n_layer")
        config |= self._stated(n_head="num_attention_heads", layer_norm_epsilon="norm_epsilon")
        if "bias_gelu_fusion" in arguments or "openai_gelu" in arguments:
            # Megatron's fused kernel of bias and GELU computes the approximation with tanh.
            approximate = arguments.get("bias_gelu_fusion") or arguments.get("openai_gelu")
            config["activation_function"] = "gelu_new" if approximate else "gelu"
        return config

    def _stated(self, **keys: str) -> dict[str, Any]:
        """Return key -> value of config.json for the keys whose argument of Megatron-LM the checkpoint states.

        Args:
            keys: key -> the argument.
        """
        stated = {key: self._arguments.get(argument) for key, argument in keys.items()}
        return {key: value for key, value in stated.items() if value is not None}

    def _shared_sizes(self, width: str, layers: str) -> dict[str, Any]:
        """Return key -> value of config.json for what every family of Megatron's models states: sizes of the vocabulary
        and the model, number of layers, and whether the embedding is tied.

        Args:
            width: the family's key of the model's width.
            layers: the family's key of the number of layers.
        """
        rows, columns = self._model.matrix(KNOWN).shape
        head = self._model.by_name.get("output_layer.weight")
        return {
            "vocab_size": rows,
            width: columns,
            layers: self._model.layers("decoder.layers.{}.mlp.linear_fc2.weight"),
            "tie_word_embeddings": head is None or are_equal(head, self._model[KNOWN]),
        }

    def _gated_width(self) -> int:
        rows = self._model.matrix("decoder.layers.0.mlp.linear_fc1.weight").shape[0]
        width = self._model.matrix("decoder.layers.0.mlp.linear_fc2.weight").shape[1]
        if rows != 2 * width:
            text = f"found {rows} rows; a model with rotary positions is expected to have a gate, so {2 * width}"
            raise self._model.error("decoder.layers.0.mlp.linear_fc1.weight", text)
        return width

    def _head_sizes(self, heads: int) -> dict[str, Any]:
        model, key = self._model, "num_attention_heads"
        layer = "decoder.layers.0.self_attention"
        width = parts_of(model.matrix(f"{layer}.linear_proj.weight").shape[1], heads, model, "linear_proj", key)
        stripes = parts_of(model.matrix(f"{layer}.linear_qkv.weight").shape[0], width, model, "linear_qkv", "head_dim")
        groups = (stripes - heads) // 2
        if stripes != heads + 2 * groups or groups < 1 or heads % groups:
            text = f"found {stripes} stripes of {width} rows, which {heads} heads of queries do not divide; check {key}"
            raise model.error(f"{layer}.linear_qkv.weight", text)
        return {"head_dim": width, "num_key_value_heads": groups}

    def _llama_tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
        groups, width = config["num_key_value_heads"], config["intermediate_size"]
        model, kind = self._model, config["model_type"]
        yield "model.embed_tokens.weight", model.matrix(KNOWN)
        for layer in range(config["num_hidden_layers"]):
            theirs, ours = f"decoder.layers.{layer}", f"model.layers.{layer}"
            yield f"{ours}.input_layernorm.weight", model[f"{theirs}.input_layernorm.weight"]
            for part in ("weight", "bias") if kind == "qwen2" else ("weight",):
                fused = model[f"{theirs}.self_attention.linear_qkv.{part}"]
                for name, tensor in zip("qkv", _unfused(fused, groups, config["head_dim"]), strict=True):
                    yield f"{ours}.self_attn.{name}_proj.{part}", tensor
            if kind == "qwen3":
                for name in "qk":
                    yield (
                        f"{ours}.self_attn.{name}_norm.weight",
                        model[f"{theirs}.self_attention.{name}_layernorm.weight"],
                    )
            yield f"{ours}.self_attn.o_proj.weight", model.matrix(f"{theirs}.self_attention.linear_proj.weight")
            yield f"{ours}.post_attention_layernorm.weight", model[f"{theirs}.pre_mlp_layernorm.weight"]
            both = model.matrix(f"{theirs}.mlp.linear_fc1.weight")
            gate = (width, both.shape[1])
            yield f"{ours}.mlp.gate_proj.weight", changed(both, gate, lambda bits: bits[:width])
            yield f"{ours}.mlp.up_proj.weight", changed(both, gate, lambda bits: bits[width:])
            yield f"{ours}.mlp.down_proj.weight", model.matrix(f"{theirs}.mlp.linear_fc2.weight")
        yield "model.norm.weight", model["decoder.final_layernorm.weight"]
        if not config["tie_word_embeddings"]:
            yield "lm_head.weight", model.matrix("output_layer.weight")

    def _gpt2_tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
        model = self._model
        heads = size(config, "n_head", model.source)
        width = parts_of(config["n_embd"], heads, model, "n_embd", "n_head")
        yield "transformer.wte.weight", model.matrix(KNOWN)
        yield "transformer.wpe.weight", model.matrix(_POSITIONS)
        for layer in range(config["n_layer"]):
            theirs, ours = f"decoder.layers.{layer}", f"transformer.h.{layer}"
            # transformers holds the matrices of a GPT-2 as [in, out].
            for part in ("weight", "bias"):
                yield f"{ours}.ln_1.{part}", model[f"{theirs}.input_layernorm.{part}"]
                parts = _unfused(model[f"{theirs}.self_attention.linear_qkv.{part}"], heads, width)
                yield f"{ours}.attn.c_attn.{part}", transposed(concatenated(parts))
                yield f"{ours}.attn.c_proj.{part}", transposed(model[f"{theirs}.self_attention.linear_proj.{part}"])
                yield f"{ours}.ln_2.{part}", model[f"{theirs}.pre_mlp_layernorm.{part}"]
                yield f"{ours}.mlp.c_fc.{part}", transposed(model[f"{theirs}.mlp.linear_fc1.{part}"])
                yield f"{ours}.mlp.c_proj.{part}", transposed(model[f"{theirs}.mlp.linear_fc2.{part}"])
        for part in ("weight", "bias"):
            yield f"transformer.ln_f.{part}", model[f"decoder.final_layernorm.{part}"]
        if not config["tie_word_embeddings"]:
            yield "lm_head.weight", model.matrix("output_layer.weight")


def _by_layer(model: ModelTensors) -> Iterator[tuple[str, LazyTensor]]:
    """Yield all tensors of the model under the names that each has in its layer. Megatron-Core stores the tensors of
    all layers as one with a further axis, if all layers are alike."""
    for name, tensor in model.by_name.items():
        if not _STACKED.match(name):
            yield _unfused_norm(name), tensor
            continue
        if tensor.shape[0] > _LAYERS_MAX:
            raise model.error(name, f"is a stack of {tensor.shape[0]} layers; at most {_LAYERS_MAX} are expected")
        rest = name.removeprefix("decoder.layers.")
        for layer in range(tensor.shape[0]):
            yield _unfused_norm(f"decoder.layers.{layer}.{rest}"), _of_layer(tensor, layer)


def _of_layer(tensor: LazyTensor, layer: int) -> LazyTensor:
    return LazyTensor(tensor.dtype, tensor.shape[1:], lambda first, end: tensor.rows(layer, layer + 1)[0][first:end])


def _unfused_norm(name: str) -> str:
    for fused, single in _FUSED_NORMS.items():
        name = name.replace(fused, single)
    return name


def _unfused(fused: LazyTensor, groups: int, width: int) -> list[LazyTensor]:
    """Return queries, keys and values of a tensor that holds them group by group.

    Args:
        groups: groups of heads, each with one head of keys and one of values.
        width: rows of a head.
    """
    stripes = fused.shape[0] // (groups * width)
    places = (slice(0, stripes - 2), slice(stripes - 2, stripes - 1), slice(stripes - 1, stripes))
    return [_stripes(fused, groups, width, place) for place in places]


def _stripes(fused: LazyTensor, groups: int, width: int, place: slice) -> LazyTensor:
    rows = groups * (place.stop - place.start) * width

    def change(bits: Bits) -> Bits:
        return bits.reshape(groups, -1, width, *bits.shape[1:])[:, place].reshape(rows, *bits.shape[1:])

    return changed(fused, (rows, *fused.shape[1:]), change)
