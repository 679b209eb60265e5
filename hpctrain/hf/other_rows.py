"""The rows of GPT-2, OPT, GPT-NeoX, BERT, RoBERTa and T5 in the table of architectures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpctrain.hf.architecture import Architecture
from hpctrain.hf.attention_settings import Rope
from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.hf.settings import CAUSAL, INIT_STD, SIZES, TIED, UNTIED, Fixed, Flag, Number, OneOf, Only, Padding, Size
from hpctrain.hf.tensors import EncoderNames, ModuleNames, TensorNames, t5_tensors
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import EncoderSpec, Gpt2Spec


class _T5:
    """The settings of T5 that depend on several keys of config.json."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        keys.names |= {"encoder_layers": "num_layers", "layers": "num_layers + num_decoder_layers"}
        encoders = keys.size("num_layers")
        return {
            "layers": encoders + keys.size("num_decoder_layers", encoders),
            "encoder_layers": encoders,
            # transformers 5 marks every T5 as tied; the former meaning of the key is in scale_decoder_outputs.
            "tied": keys.flag("tie_word_embeddings", True) and keys.flag("scale_decoder_outputs", True),
        }

    def write(self, spec: EncoderDecoderSpec) -> dict[str, Any]:
        return {
            "is_encoder_decoder": True,
            "num_layers": spec.seam,
            "num_decoder_layers": spec.layers - spec.seam,
            "tie_word_embeddings": spec.tied,
        }


def other_rows() -> Iterator[Architecture]:
    """Yield the rows of GPT-2, OPT, GPT-NeoX, BERT, RoBERTa and T5 in the table of architectures."""
    gpt2: ModuleNames = {
        "transformer.wte": "embedding",
        "transformer.wpe": "positions",
        "transformer.h.{}.ln_1": "layers.{}.attention_norm",
        "transformer.h.{}.attn.c_attn": tuple(f"layers.{{}}.attention.w{part}" for part in "qkv"),
        "transformer.h.{}.attn.c_proj": "layers.{}.attention.wo",
        "transformer.h.{}.ln_2": "layers.{}.feed_forward_norm",
        "transformer.h.{}.mlp.c_fc": "layers.{}.feed_forward.w1",
        "transformer.h.{}.mlp.c_proj": "layers.{}.feed_forward.w2",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    }
    yield Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        Gpt2Spec,
        (
            Size("dim", "n_embd"), Size("layers", "n_layer"), Size("heads", "n_head"), Size("vocab", "vocab_size"),
            Only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
            Only("scale_attn_weights", (True,), True), Only("scale_attn_by_inverse_layer_idx", (False,), False),
            Only("add_cross_attention", (False,), False),
            Size("ffn_dim", "n_inner", lambda keys: 4 * keys.size("n_embd")),
            Size("positions", "n_positions", 1024), TIED, Number("norm_eps", "layer_norm_epsilon", 1e-5), INIT_STD,
            CAUSAL,
        ),
        TensorNames(gpt2, transposed=tuple(name for name in gpt2 if ".c_" in name)),
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
        dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    )  # fmt: skip
    yield from _biased_rows()
    yield from _encoder_rows()
    yield Architecture(
        "T5ForConditionalGeneration",
        "t5",
        EncoderDecoderSpec,
        (
            OneOf("gated", "feed_forward_proj", {"relu": False, "gated-gelu": True}, "relu"), _T5(),
            Size("dim", "d_model"), Size("heads", "num_heads"), Size("head_dim", "d_kv"), Size("ffn_dim", "d_ff"),
            Size("vocab", "vocab_size"), Size("buckets", "relative_attention_num_buckets", 32),
            Size("max_distance", "relative_attention_max_distance", 128),
            Number("norm_eps", "layer_norm_epsilon", 1e-6),
            CAUSAL,
        ),
        t5_tensors,
        ignored=(
            # The first releases contain a table that no computation uses.
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
        dropout={"dropout_rate": 0.1},
    )  # fmt: skip


class _RobertaPositions:
    """The padding token and the table of positions of a RoBERTa. The first position of a sequence has the row after
    that of the padding token, `pad_token_id` + 1."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        padding, rows = keys.padding(1), keys.size("max_position_embeddings", 512)
        if keys.get("pad_token_id", 1) is None:
            keys.refuse("pad_token_id", "a token: positions begin after its number")
        offset = 0 if padding is None else padding + 1
        if rows <= offset:
            keys.refuse("max_position_embeddings", f"more than {offset}, which is pad_token_id + 1")
        return {"padding_id": padding, "position_offset": offset, "positions": rows - offset}

    def write(self, spec: EncoderSpec) -> dict[str, Any]:
        return {"pad_token_id": spec.padding_id, "max_position_embeddings": spec.position_rows}


def _encoder_rows() -> Iterator[Architecture]:
    every = (
        *SIZES, Only("hidden_act", ("gelu",), "gelu"), Only("position_embedding_type", ("absolute",), "absolute"),
        Size("segments", "type_vocab_size", 2), Only("is_decoder", (False,), False),
        Only("add_cross_attention", (False,), False), TIED, Number("norm_eps", "layer_norm_eps", 1e-12), INIT_STD,
    )  # fmt: skip
    bert = (*every, Padding(0), Size("positions", "max_position_embeddings", 512))
    bert_names = EncoderNames("bert", "cls.predictions", "transform.dense", "transform.LayerNorm")
    roberta, roberta_names = (*every, _RobertaPositions()), EncoderNames("roberta", "lm_head", "dense", "layer_norm")
    for name, model_type, settings, names in (
        ("BertForMaskedLM", "bert", bert, bert_names), ("BertForPreTraining", "bert", bert, bert_names),
        ("RobertaForMaskedLM", "roberta", roberta, roberta_names),
        ("XLMRobertaForMaskedLM", "xlm-roberta", roberta, roberta_names),
    ):  # fmt: skip
        yield Architecture(
            name,
            model_type,
            EncoderSpec,
            settings,
            names,
            ignored=(
                rf"{names.body}\.embeddings\.(position|token_type)_ids",
                rf"{names.body}\.pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)",
            ),
            renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
            dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        )


_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""Value of config.json -> value of the spec."""


class _OptWidth:
    """The key `word_embed_proj_dim`, the width of the embedding, which must be that of the blocks."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        keys.only("word_embed_proj_dim", None, keys.size("hidden_size"))
        return {}

    def write(self, spec: Gpt2Spec) -> dict[str, Any]:
        return {"word_embed_proj_dim": spec.dim}


def _biased_rows() -> Iterator[Architecture]:
    at = "model.decoder.layers.{}"
    opt: ModuleNames = {
        "model.decoder.embed_tokens": "embedding",
        "model.decoder.embed_positions": "positions",
        f"{at}.self_attn_layer_norm": "layers.{}.attention_norm",
        **{f"{at}.self_attn.{part}_proj": f"layers.{{}}.attention.w{part}" for part in "qkv"},
        f"{at}.self_attn.out_proj": "layers.{}.attention.wo",
        f"{at}.final_layer_norm": "layers.{}.feed_forward_norm",
        f"{at}.fc1": "layers.{}.feed_forward.w1",
        f"{at}.fc2": "layers.{}.feed_forward.w2",
        "model.decoder.final_layer_norm": "norm",
        "lm_head": "head",
    }
    yield Architecture(
        "OPTForCausalLM",
        "opt",
        Gpt2Spec,
        (
            Size("dim", "hidden_size"), Size("heads", "num_attention_heads"), Size("layers", "num_hidden_layers"),
            Size("ffn_dim", "ffn_dim"), Size("vocab", "vocab_size"), _OptWidth(),
            OneOf("activation", "activation_function", {"relu": "relu", **_GELUS}, "relu"),
            Only("do_layer_norm_before", (True,), True), Only("_remove_final_layer_norm", (False,), False),
            Only("enable_bias", (True,), True), Only("layer_norm_elementwise_affine", (True,), True),
            Size("positions", "max_position_embeddings", 2048), Fixed({"position_offset": 2, "norm_eps": 1e-5}), TIED,
            Number("init_std", "init_std", 0.02), Padding(1), CAUSAL,
        ),
        TensorNames(opt),
        renamed=((r"^decoder\.", "model.decoder."),),
        dropout={"dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0},
    )  # fmt: skip
    at = "gpt_neox.layers.{}"
    neox: ModuleNames = {
        "gpt_neox.embed_in": "embedding",
        f"{at}.input_layernorm": "layers.{}.attention_norm",
        f"{at}.attention.query_key_value": tuple(f"layers.{{}}.attention.w{part}" for part in "qkv"),
        f"{at}.attention.dense": "layers.{}.attention.wo",
        f"{at}.post_attention_layernorm": "layers.{}.feed_forward_norm",
        f"{at}.mlp.dense_h_to_4h": "layers.{}.feed_forward.w1",
        f"{at}.mlp.dense_4h_to_h": "layers.{}.feed_forward.w2",
        "gpt_neox.final_layer_norm": "norm",
        "embed_out": "head",
    }
    yield Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        Gpt2Spec,
        (
            *SIZES, OneOf("activation", "hidden_act", {**_GELUS, "relu": "relu"}, "gelu"),
            Only("attention_bias", (True,), True), Flag("parallel_residual", "use_parallel_residual", True),
            Rope((), base_key="rotary_emb_base", share=0.25, share_key="rotary_pct"), UNTIED, CAUSAL,
            # transformers would take its rotary positions from this key, and all else from hidden_size.
            Only("head_dim", (None,), None, written=False), Number("norm_eps", "layer_norm_eps", 1e-5), INIT_STD,
        ),
        TensorNames(neox, by_head=(f"{at}.attention.query_key_value",)),
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
        renamed=((r"^lm_head\.", "embed_out."),),
        dropout={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    )  # fmt: skip
