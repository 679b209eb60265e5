"""Writes a spec as the config.json from which transformers builds the model; pure. `hf.config` is the inverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import SEGMENTS, DecoderSpec, EncoderSpec, FamilySpec, Gpt2Spec


def config_of(spec: FamilySpec, seq_len: int, special: SpecialTokens) -> dict[str, Any]:
    """Return a config.json for a model that was initialized from the seed.

    Args:
        seq_len: tokens in a training sequence; becomes the maximum length of a model without a table of positions.
    """
    match spec:
        case DecoderSpec():
            return {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": spec.vocabulary,
                "hidden_size": spec.dim,
                "intermediate_size": spec.hidden,
                "num_hidden_layers": spec.layers,
                "num_attention_heads": spec.heads,
                "num_key_value_heads": spec.key_value_heads,
                "head_dim": spec.head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": seq_len,
                "initializer_range": spec.init_std,
                "rms_norm_eps": spec.norm_eps,
                "rope_theta": spec.rope_base,
                "rope_scaling": None,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "mlp_bias": False,
                "tie_word_embeddings": spec.tied,
                "bos_token_id": None,
                "eos_token_id": special.end_of_text,
                "pad_token_id": None,
            }
        case Gpt2Spec():
            return {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": spec.vocabulary,
                "n_positions": spec.positions,
                "n_embd": spec.dim,
                "n_layer": spec.layers,
                "n_head": spec.heads,
                "n_inner": spec.hidden,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "layer_norm_epsilon": spec.norm_eps,
                "initializer_range": spec.init_std,
                "tie_word_embeddings": spec.tied,
                "bos_token_id": special.end_of_text,
                "eos_token_id": special.end_of_text,
            }
        case EncoderSpec():
            return {
                "architectures": ["BertForMaskedLM"],
                "model_type": "bert",
                "vocab_size": spec.vocabulary,
                "hidden_size": spec.dim,
                "num_hidden_layers": spec.layers,
                "num_attention_heads": spec.heads,
                "intermediate_size": spec.hidden,
                "hidden_act": "gelu",
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "max_position_embeddings": spec.positions,
                "type_vocab_size": SEGMENTS,
                "initializer_range": spec.init_std,
                "layer_norm_eps": spec.norm_eps,
                "position_embedding_type": "absolute",
                "tie_word_embeddings": spec.tied,
                "pad_token_id": None,
            }
        case EncoderDecoderSpec():
            return {
                "architectures": ["T5ForConditionalGeneration"],
                "model_type": "t5",
                "is_encoder_decoder": True,
                "vocab_size": spec.vocabulary,
                "d_model": spec.dim,
                "d_kv": spec.head_width,
                "d_ff": spec.hidden,
                "num_layers": spec.seam,
                "num_decoder_layers": spec.layers - spec.seam,
                "num_heads": spec.heads,
                "relative_attention_num_buckets": spec.buckets,
                "relative_attention_max_distance": spec.max_distance,
                "dropout_rate": 0.0,
                "layer_norm_epsilon": spec.norm_eps,
                "feed_forward_proj": "gated-gelu" if spec.gated else "relu",
                "tie_word_embeddings": spec.tied,
                "pad_token_id": special.start,
                "decoder_start_token_id": special.start,
                "eos_token_id": special.end_of_text,
            }


def continued_config(recorded: Mapping[str, Any], spec: FamilySpec, seq_len: int) -> dict[str, Any]:
    """Return the config.json of the folder that a run started from, adapted to the run's current weights."""
    config = {key: value for key, value in recorded.items() if key not in ("transformers_version", "dtype")}
    if config.get("architectures") == ["BertForPreTraining"]:
        config["architectures"] = ["BertForMaskedLM"]  # its other head was not trained
    if isinstance(spec, EncoderDecoderSpec) and not spec.tied:
        # By this key transformers 5 recognizes a T5 without scaling; it scales the one that it wrote itself.
        config["tie_word_embeddings"] = False
    if isinstance(spec, DecoderSpec):
        config["max_position_embeddings"] = max(seq_len, config.get("max_position_embeddings") or 0)
    return config
