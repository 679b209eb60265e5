"""The rows of decoders like Llama in the table of architectures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hpctrain.hf.architecture import Architecture
from hpctrain.hf.attention_settings import Rope, Windows, every_block, first_blocks
from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.hf.settings import (
    CAUSAL,
    INIT_STD,
    SIZES,
    TIED,
    UNTIED,
    Fixed,
    HeadWidth,
    Number,
    OneOf,
    Only,
    Padding,
    Setting,
    Size,
)
from hpctrain.hf.tensors import ModuleNames, TensorNames
from hpctrain.records.model.decoder_spec import DecoderSpec

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
"""Value of config.json -> value of the spec."""
_BIAS = OneOf("attention_bias", "attention_bias", {False: "none", True: "all"}, False)


def _kv_heads(absent: int | None = None) -> Size:
    """Return the setting of the number of key heads. Null means as many as query heads.

    Args:
        absent: number that transformers assumes if the key is absent; None: as for null.
    """

    def default(keys: ConfigKeys) -> int:
        given: int | None = keys.get("num_key_value_heads", absent)
        return keys.size("num_attention_heads") if given is None else given

    return Size("kv_heads", "num_key_value_heads", default)


_BLOCK = "model.layers.{}"
_LLAMA_NAMES: ModuleNames = {
    "model.embed_tokens": "embedding",
    f"{_BLOCK}.input_layernorm": "layers.{}.attention_norm",
    f"{_BLOCK}.self_attn.q_proj": "layers.{}.attention.wq",
    f"{_BLOCK}.self_attn.k_proj": "layers.{}.attention.wk",
    f"{_BLOCK}.self_attn.v_proj": "layers.{}.attention.wv",
    f"{_BLOCK}.self_attn.o_proj": "layers.{}.attention.wo",
    f"{_BLOCK}.self_attn.q_norm": "layers.{}.attention.q_norm",
    f"{_BLOCK}.self_attn.k_norm": "layers.{}.attention.k_norm",
    f"{_BLOCK}.post_attention_layernorm": "layers.{}.feed_forward_norm",
    f"{_BLOCK}.mlp.gate_proj": "layers.{}.feed_forward.w1",
    f"{_BLOCK}.mlp.up_proj": "layers.{}.feed_forward.w3",
    f"{_BLOCK}.mlp.down_proj": "layers.{}.feed_forward.w2",
    "model.norm": "norm",
    "lm_head": "head",
}
_OUTPUT_NORMS: ModuleNames = {
    **_LLAMA_NAMES,
    f"{_BLOCK}.post_attention_layernorm": "layers.{}.attention_output_norm",
    f"{_BLOCK}.pre_feedforward_layernorm": "layers.{}.feed_forward_norm",
    f"{_BLOCK}.post_feedforward_layernorm": "layers.{}.feed_forward_output_norm",
}
"""Names of decoders with norms on the outputs of attention and feed-forward layer."""
_FUSED: ModuleNames = {
    **{name: parts for name, parts in _LLAMA_NAMES.items() if not re.search(r"\.([qkv]|gate|up)_proj$", name)},
    f"{_BLOCK}.self_attn.qkv_proj": tuple(f"layers.{{}}.attention.w{part}" for part in "qkv"),
    f"{_BLOCK}.mlp.gate_up_proj": ("layers.{}.feed_forward.w1", "layers.{}.feed_forward.w3"),
}  # fmt: skip
_CONSTANT_ANGLES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _row(
    name: str, model_type: str, *settings: Setting, names: ModuleNames = _LLAMA_NAMES, kv_heads: int | None = None,
    activation: str = "hidden_act", head_width: int | None = None, tied: Setting = UNTIED, norm_eps: float = 1e-6,
    padding: int | None = None,
) -> Architecture:  # fmt: skip
    """Return the row of a class: the settings that all decoders have, and `settings`.

    Args:
        name: name of the class.
        model_type: its `model_type`.
        settings: settings that not all decoders have.
        names: names of the tensors.
        kv_heads: number of key heads that transformers assumes if the key is absent; None: as many as query heads.
        activation: key of the activation.
        head_width: width of a head that transformers assumes if the key is absent; None: width divided by heads.
        tied: the setting of the tied head.
        norm_eps: number under the root of norms that transformers assumes if the key is absent.
        padding: padding token that transformers assumes if the key is absent.
    """
    first = "gelu_pytorch_tanh" if activation == "hidden_activation" else "silu"
    every = (
        *SIZES, _kv_heads(kv_heads), HeadWidth(head_width), OneOf("activation", activation, _ACTIVATIONS, first),
        tied, Number("norm_eps", "rms_norm_eps", norm_eps), INIT_STD, Padding(padding), CAUSAL,
    )  # fmt: skip
    return Architecture(name, model_type, DecoderSpec, (*every, *settings), TensorNames(names), _CONSTANT_ANGLES)


def decoder_rows() -> Iterator[Architecture]:
    """Yield the rows of decoders like Llama in the table of architectures."""
    yield _row("LlamaForCausalLM", "llama", _BIAS, Only("mlp_bias", (False,), False), Rope())
    yield _row("MistralForCausalLM", "mistral", Rope(), Windows(4096), kv_heads=8)
    qwen = Windows(4096, enabled_by="use_sliding_window", full_blocks=first_blocks("max_window_layers", 28))
    yield _row("Qwen2ForCausalLM", "qwen2", Fixed({"attention_bias": "qkv"}), Rope(), qwen, kv_heads=32)
    qwen3 = Fixed({"qk_norm": "head"})
    yield _row("Qwen3ForCausalLM", "qwen3", _BIAS, qwen3, Rope(), qwen, kv_heads=32, head_width=128)
    olmo = Fixed({"norms": "after", "qk_norm": "width"})
    yield _row("Olmo2ForCausalLM", "olmo2", _BIAS, olmo, Rope(), names=_OUTPUT_NORMS, norm_eps=1e-5, padding=1)
    rope = Rope(("longrope",), share=1.0, original=4096)
    phi = _row("Phi3ForCausalLM", "phi3", rope, Windows(), names=_FUSED, norm_eps=1e-5, padding=32_000)
    yield replace(phi, dropout=dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0))
    yield from _gemma_rows()


def _gemma_rows() -> Iterator[Architecture]:
    def row(name: str, model_type: str, logit_cap: float | None, *settings: Setting) -> Architecture:
        return _row(
            name, model_type, _BIAS, *settings,
            Fixed({"norm_offset": True, "embedding_scaled": True, "norms": "both"}),
            Only("use_bidirectional_attention", (False, None), None),
            Size("score_width", "query_pre_attn_scalar", 256),
            Number("logit_cap", "final_logit_softcapping", logit_cap, or_null=True),
            names=_OUTPUT_NORMS, kv_heads=4, activation="hidden_activation", head_width=256, tied=TIED,
            padding=0,
        )  # fmt: skip

    score_cap = Number("score_cap", "attn_logit_softcapping", 50.0, or_null=True)
    windows = Windows(4096, full_blocks=every_block(None, 2))
    yield row("Gemma2ForCausalLM", "gemma2", 30.0, score_cap, Rope(), windows)
    # The class has the key and does not use it.
    no_cap = Only("attn_logit_softcapping", (None,), None)
    # In a mapping for each kind of block, transformers reads the settings of other scalings from other places.
    rope = Rope(("linear",), base=1e6, by_kind=True)
    windows = Windows(4096, full_blocks=every_block("sliding_window_pattern", 6), rope_base=10_000.0)
    yield row("Gemma3ForCausalLM", "gemma3_text", None, Fixed({"qk_norm": "head"}), no_cap, rope, windows)
