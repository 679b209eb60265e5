"""What of a config.json is understood, and what is refused with its key."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.config import architecture_for, config_of, continued_config, spec_of
from hpctrain.hf.tensors import assign_to_shards, index_of, shard_bytes
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS

LLAMA = config_of(DecoderSpec(layers=2, dim=64, heads=4, vocab=100), 128, SpecialTokens(100, 100, 5))
T5 = config_of(EncoderDecoderSpec(layers=4, dim=64, heads=4, vocab=100), 128, SpecialTokens(100, 100, 5, start=0))


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
        ({"head_dim": 9}, "the rotated width of a head is 9; rotary positions need an even number"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size: found null; allowed: a whole number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: found 2.5"),
        ({"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, 'architectures: found ["Qwen2MoeForCausalLM"]'),
        ({"architectures": None, "model_type": "mamba"}, 'found null (model_type "mamba"); allowed: LlamaForCausalLM'),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window: found -4; allowed: a whole"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
          "layer_types": ["full_attention", "chunked_attention"]}, "sliding_attention for each of num_hidden_layers 2"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
         "use_bidirectional_attention: found true; allowed: false or null"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1],
          "long_factor": [2], "original_max_position_embeddings": 64}}, "short_factor has 1 numbers, a head 8 angles"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "llama3"}}, "rope_type default, longrope"),
    ],
)  # fmt: skip
def test_what_no_model_here_has_is_refused_by_its_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError) as refused:
        spec_of({**LLAMA, **change}, "x/config.json")
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).startswith("x/config.json: ")


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
    index = index_of(files, 2)
    assert index["metadata"]["total_size"] == 2 * sum(tensor.count for tensor in tensors)
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
