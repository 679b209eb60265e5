"""What of a config.json is understood, and what is refused with its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.config import architecture, architecture_for, config_of, continued_config, dropout_of
from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.hf.tensors import assign_to_shards, index_of, shard_bytes
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS, EncoderSpec, FamilySpec, Gpt2Spec

LLAMA = config_of(DecoderSpec(layers=2, dim=64, heads=4, vocab=100), 128, SpecialTokens(100, 100, 5))
LLAMA_SIZES = {key: LLAMA[key] for key in LLAMA if key.startswith("num_") or key.endswith("_size")}
GEMMA3: dict[str, Any] = {"architectures": None, "model_type": "gemma3_text", "hidden_act": None}
PHI: dict[str, Any] = {"architectures": None, "model_type": "phi3"}
T5 = config_of(EncoderDecoderSpec(layers=4, dim=64, heads=4, vocab=100), 128, SpecialTokens(100, 100, 5, start=0))


def spec_of(config: Mapping[str, Any], source: str) -> FamilySpec:
    return architecture(config, source).read(ConfigKeys(config, source))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back(preset: str) -> None:
    spec = PRESETS[preset].model_copy(update={"vocab": 32_000})
    again = spec_of(config_of(spec, 512, SpecialTokens(100, 100, 1, start=0)), "config.json")
    assert config_of(again, 512, SpecialTokens(100, 100, 1, start=0)) == config_of(
        spec, 512, SpecialTokens(100, 100, 1, start=0)
    )
    assert again.parameters() == spec.parameters()
    # BERT without a tied head has its bias under two names.
    assert sum(tensor.count for tensor in architecture_for(spec).tensors(spec)) == spec.parameters()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, '{"rope_type": "linear"}; allowed: factor as a number above 0'),
        ({"rope_parameters": {"type": "proportional"}}, "allowed: rope_type default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "; dynamic changes the angles with the length of"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "allowed: rope_type default, linear, llama3, yarn"),
        ({"rope_scaling": [1]}, "rope_scaling: found [1]; allowed: null or a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5; allowed: 1"),
        ({"mlp_bias": True}, "mlp_bias: found true; allowed: false"),
        ({"hidden_act": "relu"}, 'hidden_act: found "relu"; allowed: "silu" or "swish" or "gelu"'),
        ({"head_dim": 9}, "head_dim is 9; rotary positions need an even number"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size: found null; allowed: a whole number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: found 2.5"),
        ({"num_key_value_heads": 3}, ": num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, 'architectures: found ["Qwen2MoeForCausalLM"]'),
        ({"architectures": None, "model_type": "mamba"}, 'found null (model_type "mamba"); allowed: LlamaForCausalLM'),
        ({"architectures": None, "model_type": "mistral", "sliding_window": -4}, "sliding_window: found -4; "),
        ({**GEMMA3, "layer_types": ["full_attention", "chunked_attention"]},
         "sliding_attention for each of num_hidden_layers 2"),
        ({"architectures": None, "model_type": "gemma2", "use_bidirectional_attention": True},
         "use_bidirectional_attention: found true; allowed: false or null"),
        ({**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1],
          "long_factor": [2], "original_max_position_embeddings": 64}}, "short_factor has 1 numbers, a head 8 angles"),
        ({**PHI, "rope_scaling": {"type": "llama3"}}, "rope_type default, longrope"),
        ({"is_causal": False}, "is_causal: found false; allowed: true"),
        ({"model_type": "mistral"}, 'model_type: found "mistral"; allowed: llama, as architectures says; correct one'),
        ({"rope_theta": 1}, "rope_theta: found 1.0; allowed: greater than 1"),
        ({"rope_theta": 0.5, "rope_scaling": {"rope_type": "yarn", "rope_theta": 1, "factor": 2}},
         "rope_scaling.rope_theta: found 1.0; allowed: greater than 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: found 1000000; allowed: less than or equal to "),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
         "config.json: rope_parameters: high_freq_factor 1 is not above low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "allowed: factor as a number above 0"),
        ({**GEMMA3, "attn_logit_softcapping": 2.0}, "attn_logit_softcapping: found 2.0; allowed: null"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window: found null; allowed: a whole number above 0"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
         "allowed: rope_type default in sliding_attention"),
        ({**PHI, "rope_parameters": {"partial_rotary_factor": 0.1}}, "rope_parameters: found {"),
        ({**PHI, "rope_parameters": {"partial_rotary_factor": 7.0}}, "allowed: a share of the 16 numbers of a head"),
        ({**PHI, "rope_parameters": {"partial_rotary_factor": "half"}, "partial_rotary_factor": 0.5},
         'rope_parameters: found {"partial_rotary_factor": "half"}; allowed: partial_rotary_factor as a number above'),
        ({"pad_token_id": 100}, "pad_token_id: found 100; allowed: null, or a token of the vocabulary of 100"),
    ],
)  # fmt: skip
def test_what_no_model_here_has_is_refused_by_its_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError) as refused:
        spec_of({**LLAMA, **change}, "x/config.json")
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).startswith("x/config.json: ")


WIDE_VOCABULARY = 262_144
PUBLISHED: list[tuple[int, dict[str, Any]]] = [
    (1_235_814_400, {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}}),
    (7_241_732_096, {
        "model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096}),
    (12_247_782_400, {
        "model_type": "mistral", "vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 14_336,
        "head_dim": 128, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "sliding_window": None}),
    (494_032_768, {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    (596_049_920, {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    (2_614_341_888, {
        "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}),
    (999_885_952, {
        "model_type": "gemma3_text", "vocab_size": WIDE_VOCABULARY, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512}),
    (3_821_079_552, {
        "model_type": "phi3", "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 2047}),
    (3_836_021_760, {
        "model_type": "phi3", "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True}),
    (1_484_916_736, {
        "model_type": "olmo2", "vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 16}),
]  # fmt: skip
"""Parameters and config.json of published models, keys with the default of transformers left out."""


@pytest.mark.parametrize(("count", "config"), PUBLISHED)
def test_published_models_have_their_size(count: int, config: dict[str, Any]) -> None:
    spec = spec_of(config, "config.json")
    assert spec.parameters() == count
    assert sum(tensor.count for tensor in architecture(config, "config.json").tensors(spec)) == count


def test_windows_and_angles_of_published_models() -> None:
    gemma = spec_of(PUBLISHED[6][1], "config.json")
    assert isinstance(gemma, DecoderSpec)
    assert [gemma.block_window(block) for block in range(7)] == [512] * 5 + [None, 512]
    assert (gemma.rope_base, gemma.window_rope_base, gemma.head_dim) == (1e6, 1e4, 256)
    nested = {**PUBLISHED[6][1], "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}}  # fmt: skip
    scaled = spec_of(nested, "config.json")
    assert isinstance(scaled, DecoderSpec)
    assert (scaled.rope_base, scaled.window_rope_base) == (1e6, 5e3)
    assert scaled.rope_scaling is not None
    phi = spec_of(PUBLISHED[8][1], "config.json")
    assert isinstance(phi, DecoderSpec)
    assert (phi.rotary_dim, phi.window) == (96, None)
    # Qwen's folders name a window that is switched off.
    off = {**PUBLISHED[3][1], "use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 21}
    assert spec_of(off, "config.json") == spec_of(PUBLISHED[3][1], "config.json")


def test_a_gemma_without_windows_is_read() -> None:
    spec = spec_of({**PUBLISHED[6][1], "layer_types": ["full_attention"] * 26}, "config.json")
    assert isinstance(spec, DecoderSpec)
    assert (spec.window, spec.window_rope_base, spec.rope_base) == (None, None, 1e6)
    # transformers makes the mask of a window in any case.
    assert architecture_for(spec).write(spec)["sliding_window"] == 4096


def test_a_decoder_is_exported_as_the_first_class_that_has_its_settings() -> None:
    llama = DecoderSpec(layers=2, dim=64, heads=4, vocab=100)
    for name, settings in {
        "LlamaForCausalLM": {"head_dim": 6, "attention_bias": "all"},
        "MistralForCausalLM": {"window": 7},
        "Qwen2ForCausalLM": {"attention_bias": "qkv", "window": 7, "full_blocks": (0,)},
        "Qwen3ForCausalLM": {"qk_norm": "head"},
        "Olmo2ForCausalLM": {"norms": "after", "qk_norm": "width"},
        "Phi3ForCausalLM": {"rotary_dim": 8},
    }.items():
        assert architecture_for(llama.model_copy(update=settings)).name == name
    gemma3 = spec_of({**GEMMA3, **LLAMA_SIZES}, "config.json").model_copy(update={"score_cap": 5.0})
    with pytest.raises(InputError, match="score_cap"):
        architecture_for(gemma3)  # the class does not use its key of the cap
    assert "is_causal" not in architecture_for(llama).write(llama)
    with pytest.raises(InputError) as refused:
        architecture_for(llama.model_copy(update={"norms": "both", "rotary_dim": 8}))
    assert str(refused.value) == "model.dims: no class of transformers has these settings together: norms, rotary_dim"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pad_token_id": None}, "pad_token_id: found null; allowed: a token: positions begin after its number"),
        ({"max_position_embeddings": 2}, "max_position_embeddings: found 2; allowed: more than 2, which is pad_token"),
        ({"vocab_size": 1}, "pad_token_id: not there; allowed: null, or a token of the vocabulary of 1"),
        ({"pad_token_id": "1"}, 'pad_token_id: found "1"; allowed: null, or a token of the vocabulary of 100'),
    ],
)  # fmt: skip
def test_positions_of_a_roberta_begin_after_its_padding_token(change: dict[str, Any], said: str) -> None:
    bert = config_of(EncoderSpec(layers=2, dim=64, heads=4, vocab=100), 128, SpecialTokens(100, 100, 5))
    named = {key: value for key, value in bert.items() if key != "pad_token_id"}
    roberta = {
        **named,
        "architectures": ["RobertaForMaskedLM"],
        "model_type": None,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }
    spec = spec_of(roberta, "config.json")
    assert isinstance(spec, EncoderSpec)
    assert (spec.positions, spec.position_offset, spec.padding_id, spec.segments) == (512, 2, 1, 1)
    assert (spec.sequence_length_error(512), spec.sequence_length_error(513) is None) == (None, False)
    with pytest.raises(FileError) as refused:
        spec_of({**roberta, **change}, "config.json")
    assert str(refused.value).startswith(f"config.json: {said}")
    assert len(str(refused.value).splitlines()) == 1


OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "ffn_dim": 128, "vocab_size": 100,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def test_settings_of_opt_and_gpt_neox_are_read() -> None:
    opt, neox = spec_of(OPT, "config.json"), spec_of(NEOX, "config.json")
    assert isinstance(opt, Gpt2Spec)
    assert (opt.activation, opt.positions, opt.position_offset, opt.padding_id) == ("relu", 2048, 2, 1)
    assert opt.sequence_length_error(2049) is not None
    assert isinstance(neox, Gpt2Spec)
    assert (neox.activation, neox.parallel_residual, neox.rotary_dim, neox.rope_base) == ("gelu", True, 4, 10_000.0)
    assert neox.sequence_length_error(4096) is None
    early = {
        **NEOX,
        "rotary_pct": 0.5,
        "rotary_emb_base": 5000,
        "use_parallel_residual": False,
        "hidden_act": "gelu_fast",
    }
    spec = spec_of(early, "config.json")
    assert isinstance(spec, Gpt2Spec)
    assert (spec.activation, spec.parallel_residual, spec.rotary_dim, spec.rope_base) == ("gelu_tanh", False, 8, 5000.0)
    assert continued_config({**NEOX, "max_position_embeddings": 64}, neox, 128)["max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**OPT, "word_embed_proj_dim": 32}, "word_embed_proj_dim: found 32; allowed: null or 64"),
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before: found false; allowed: true"),
        ({**OPT, "enable_bias": False}, "enable_bias: found false; allowed: true"),
        ({**OPT, "_remove_final_layer_norm": True}, "_remove_final_layer_norm: found true; allowed: false"),
        ({**NEOX, "rotary_pct": 0.01}, "rotary_pct: found 0.01; allowed: a share of the 16 numbers of a head"),
        ({**NEOX, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: found {\"type\": \"linear\""),
        ({**NEOX, "rope_scaling": {"type": "linear", "factor": 2.0}}, "; allowed: rope_type default"),
        ({**NEOX, "rope_parameters": "linear"}, 'rope_parameters: found "linear"; allowed: null or a mapping'),
        ({**NEOX, "head_dim": 8}, "head_dim: found 8; allowed: null"),
        ({**NEOX, "num_attention_heads": 5}, "config.json: hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({**NEOX, "is_causal": False}, "is_causal: found false; allowed: true"),
        ({**OPT, "is_causal": None}, "is_causal: found null; allowed: true"),
        ({**NEOX, "rotary_emb_base": "x"}, 'rotary_emb_base: found "x"; allowed: a number above 0'),
        ({**NEOX, "attention_bias": False}, "attention_bias: found false; allowed: true"),
    ],
)  # fmt: skip
def test_what_no_opt_or_gpt_neox_here_has_is_refused_by_its_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError) as refused:
        spec_of(config, "config.json")
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_dropout_is_named_by_the_key_of_its_class() -> None:
    assert dropout_of(OPT) == ["dropout 0.1"]
    assert dropout_of({**OPT, "dropout": 0.0, "attention_dropout": 0.2, "resid_pdrop": 0.3}) == [
        "attention_dropout 0.2"
    ]
    assert dropout_of(NEOX) == dropout_of(LLAMA) == dropout_of({**LLAMA, "hidden_dropout_prob": 0.1}) == []


@pytest.mark.parametrize(("number", "row"), [(None, None), (7, 7), (-1, 99)])
def test_a_padding_token_is_a_row_as_in_torch(number: int | None, row: int | None) -> None:
    assert spec_of({**LLAMA, "pad_token_id": number}, "config.json").padding_id == row


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(FileError) as refused:
        spec_of({**T5, "feed_forward_proj": "gated-silu", "d_kv": -1}, "config.json")
    assert [mistake.field for mistake in refused.value.mistakes] == ["feed_forward_proj", "d_kv"]


def test_early_files_leave_keys_out() -> None:
    early = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "rope_theta", "architectures")}
    spec = spec_of(early, "config.json")
    assert isinstance(spec, DecoderSpec)
    assert (spec.key_value_heads, spec.rope_base) == (4, 10_000.0)
    later = spec_of({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "config.json")
    assert isinstance(later, DecoderSpec)
    assert later.rope_base == 5e5


def test_a_run_goes_on_with_the_config_it_began_with() -> None:
    recorded = {**LLAMA, "bos_token_id": 7, "transformers_version": "5.0", "max_position_embeddings": 64}
    went_on = continued_config(recorded, spec_of(recorded, "config.json"), 128)
    assert (went_on["bos_token_id"], went_on["max_position_embeddings"]) == (7, 128)
    assert "transformers_version" not in went_on
    newer = {**T5, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert continued_config(newer, spec_of(newer, "config.json"), 128)["tie_word_embeddings"] is False


def test_tensors_are_shared_out_in_their_order() -> None:
    spec = DecoderSpec(layers=3, dim=64, heads=4, vocab=100)
    tensors = list(architecture_for(spec).tensors(spec))
    files = assign_to_shards(tensors, 2, 30_000)
    assert [tensor for group in files.values() for tensor in group] == tensors
    assert all(2 * sum(tensor.count for tensor in group) <= 30_000 for group in files.values())
    assert next(iter(files)) == f"model-00001-of-{len(files):05d}.safetensors"
    index = index_of(files, 123)
    assert index["metadata"] == {"total_parameters": sum(tensor.count for tensor in tensors), "total_size": 123}
    assert set(index["weight_map"]) == {tensor.name for tensor in tensors}
    assert len(assign_to_shards(tensors, 2, 1)) == len(tensors)
    assert list(assign_to_shards(tensors, 2, 1 << 40)) == ["model.safetensors"]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("700", 700), ("2kb", 2000)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5 PB", "1e9", "5GBs"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--max-shard-size"):
        shard_bytes(text)
