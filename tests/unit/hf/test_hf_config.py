"""What of a config.json is understood, and what is refused with its key."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.config import config_of, continued_config, spec_of
from hpctrain.hf.tensors import assign_to_shards, index_of, shard_bytes, tensors_of
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.families import PRESETS, DecoderSpec

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
    assert sum(tensor.count for tensor in tensors_of(spec)) == spec.parameters()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, '{"rope_type": "llama3"}; allowed: null, or rope_type default'),
        ({"rope_parameters": {"type": "yarn"}}, "rope_parameters: found"),
        ({"attention_bias": True}, "attention_bias: found true; allowed: false"),
        ({"hidden_act": "gelu"}, 'hidden_act: found "gelu"; allowed: "silu" or "swish"'),
        ({"head_dim": 8}, "head_dim: found 8; allowed: null or 16"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size: found null; allowed: a whole number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: found 2.5"),
        ({"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"architectures": ["Qwen2ForCausalLM"]}, 'architectures: found ["Qwen2ForCausalLM"]'),
        ({"architectures": None, "model_type": "mamba"}, 'found null (model_type "mamba"); allowed: LlamaForCausalLM'),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window: found 64; allowed: null"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window: not there; allowed: null"),
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
    tensors = tensors_of(DecoderSpec(layers=3, dim=64, heads=4, vocab=100))
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
