"""Checkpoints of torchtitan's llama3, as DCP folders.

torchtitan rotates neighbouring numbers of a head by one angle, transformers the number i and the number i + half of the
head. So the conversion puts the rows of the matrices of queries and keys into the order of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpctrain.hf.convert.layout import LLAMA_KEYS, ModelTensors, are_equal, changed, parts_of, size
from hpctrain.hf.convert.torch_file import Bits, LazyTensor

KNOWN = "tok_embeddings.weight"
_RENAMED = ((re.compile(r"\.attention\.qkv_linear\."), ".attention."), (re.compile(r"^output\."), "lm_head."))
"""Names of torchtitan 0.3 and of earlier versions, brought together."""
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
"""torchtitan's name of a module of a layer -> transformers' name in a Llama."""


class TorchtitanLayout:
    """The tensors of torchtitan's llama3 in a checkpoint."""

    tool = "torchtitan's llama3"
    needed: tuple[str, ...] = LLAMA_KEYS
    may_shrink: tuple[str, ...] = ()

    def __init__(self, model: ModelTensors) -> None:
        self._model = ModelTensors(model.source, {_current(name): item for name, item in model.by_name.items()})

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a Llama's config.json that the shapes of the tensors tell.

        Raises:
            FileError: a tensor is missing, or has a shape that does not fit.
        """
        model = self._model
        vocabulary, width = model.matrix(KNOWN).shape
        head = model.by_name.get("lm_head.weight")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": model.matrix("layers.0.feed_forward.w1.weight").shape[0],
            "num_hidden_layers": model.layers("layers.{}.attention.wo.weight"),
            "tie_word_embeddings": head is None or are_equal(head, model[KNOWN]),
        }
        if "num_attention_heads" in given:
            heads = size(given, "num_attention_heads", model.source)
            queries, keys = (model.matrix(f"layers.0.attention.{part}.weight").shape[0] for part in ("wq", "wk"))
            config["head_dim"] = parts_of(queries, heads, model, "attention.wq", "num_attention_heads")
            config["num_key_value_heads"] = parts_of(keys, config["head_dim"], model, "attention.wk", "head_dim")
        return config

    def tensors(self, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        """Return the tensors of a Llama's Hugging Face folder.

        Raises:
            FileError: tensors are missing, or there are others than those of a Llama.
        """
        made = {"model.embed_tokens.weight": self._model[KNOWN]}
        for layer in range(config["num_hidden_layers"]):
            for theirs, name in _LAYER.items():
                tensor = self._model[f"layers.{layer}.{theirs}.weight"]
                if theirs in ("attention.wq", "attention.wk"):
                    tensor = _halves(tensor, config["head_dim"])
                made[f"model.layers.{layer}.{name}.weight"] = tensor
        made["model.norm.weight"] = self._model["norm.weight"]
        if not config["tie_word_embeddings"]:
            made["lm_head.weight"] = self._model["lm_head.weight"]
        self._model.check_all_used(self.tool, "lm_head.weight")
        return made


def _current(name: str) -> str:
    for pattern, text in _RENAMED:
        name = pattern.sub(text, name)
    return name


def _halves(tensor: LazyTensor, head_dim: int) -> LazyTensor:
    """Return the matrix of queries or keys with the even rows of each head before its odd ones."""

    def change(bits: Bits) -> Bits:
        width = bits.shape[1]
        return bits.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(-1, width)

    return changed(tensor, tensor.shape, change)
