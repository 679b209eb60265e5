"""Random settings of rotary positions and windows: transformers computes the same, or the settings are refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from hpctrain.base.errors import FileError
from hpctrain.hf.config import architecture
from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.model.rotary import rotary_angles
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.families import Gpt2Spec

pytestmark = pytest.mark.slow

LAYERS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1,
}  # fmt: skip
CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "phi3": "Phi3", "gpt_neox": "GPTNeoX", "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
}  # fmt: skip
OUTSIDE: dict[str, list[Any]] = {
    "rope_theta": [300.0, 1000], "rotary_emb_base": [200], "rotary_pct": [0.5, 1.0],
    "partial_rotary_factor": [1.0, 0.5],
    "original_max_position_embeddings": [8, 24], "max_position_embeddings": [64, 128], "rope_local_base_freq": [33.0],
    "head_dim": [8, 16, None], "sliding_window": [5, None], "use_sliding_window": [True, False],
    "layer_types": [["full_attention"] * LAYERS, ["full_attention", "sliding_attention"] * (LAYERS // 2)],
}  # fmt: skip
INSIDE: dict[str, list[Any]] = {
    "rope_theta": [100.0, 5000], "partial_rotary_factor": [0.5, 1.0, 1], "mscale": [1.0, 0], "mscale_all_dim": [0.5],
    "original_max_position_embeddings": [8, 16], "beta_fast": [8.0, None], "beta_slow": [1, 2.0],
    "attention_factor": [1.3, None], "truncate": [True, False, None],
}  # fmt: skip
NEEDED: dict[str, list[Any]] = {
    "factor": [2.0, 4, 1.0, None], "low_freq_factor": [1.0, 2], "high_freq_factor": [4.0, 8],
    "short_factor": [[1.0, 1.5, 2.0, 3.0], [1.0, 2.0]], "long_factor": [[2.0, 2.5, 4.0, 5.0], [2.0, 3.0]],
}  # fmt: skip


def mapping(draw: random.Random) -> dict[str, Any]:
    """Settings as in `rope_parameters`."""
    modes = ["default", "linear", "llama3", "yarn", "longrope", "su"]
    values = {draw.choice(["rope_type", "rope_type", "type"]): draw.choice(modes)} if draw.random() < 0.8 else {}
    for table, share in ((INSIDE, 0.3), (NEEDED, 0.9)):
        values |= {key: draw.choice(choices) for key, choices in table.items() if draw.random() < share}
    return values


def random_config(draw: random.Random, kind: str) -> dict[str, Any]:
    """Values of a config.json."""
    config = {"model_type": kind, **SIZES}
    config |= {key: draw.choice(choices) for key, choices in OUTSIDE.items() if draw.random() < 0.25}
    for key in ("rope_scaling", "rope_parameters"):
        if draw.random() < 0.5:
            value = draw.choice([None, {}, mapping(draw), mapping(draw)])
            if kind == "gemma3_text" and key == "rope_parameters" and value is not None:
                value = {
                    "full_attention": value,
                    "sliding_attention": draw.choice([{}, {"rope_theta": 50}, mapping(draw)]),
                }
            config[key] = value
    return config


def same(spec: DecoderSpec | Gpt2Spec, config: Any, rotary: Any) -> bool:
    """Whether windows, cosines and sines are those of transformers in every block, for short and long texts."""
    for block in range(LAYERS):
        kinds = config.layer_types if config.model_type in ("qwen2", "gemma2", "gemma3_text") else None
        named = (kinds[block],) if kinds and config.model_type == "gemma3_text" else ()
        base, scaling = spec.block_rope(block) if isinstance(spec, DecoderSpec) else (spec.rope_base, None)
        if isinstance(spec, DecoderSpec) and config.model_type != "llama":
            windowed = not kinds or kinds[block] == "sliding_attention"
            if spec.block_window(block) != (config.sliding_window if windowed else None):
                return False
        for seq in (8, 40):
            theirs = rotary(torch.zeros(1, seq, 32), torch.arange(seq)[None], *named)
            ours = rotary_angles(seq, spec.rotary_dim or spec.head_width, base, scaling, torch.device("cpu"))
            for mine, other in zip(ours, theirs, strict=True):
                if not torch.equal(torch.tensor(other[0].shape), torch.tensor([seq, 2 * mine.shape[1]])):
                    return False
                if not torch.allclose(mine, other[0, :, : mine.shape[1]], atol=2e-5):
                    return False
    return True


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("kind", CLASSES)
def test_angles_and_windows_are_those_of_transformers(kind: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    name = CLASSES[kind].removesuffix("Text")
    module = getattr(transformers.models, kind.removesuffix("_text"))
    rotary = getattr(getattr(module, f"modeling_{kind.removesuffix('_text')}"), f"{name}RotaryEmbedding")
    draw, compared = random.Random(kind), 0
    for _ in range(200):
        values = random_config(draw, kind)
        try:
            spec = architecture(values, "config.json").read(ConfigKeys(copy.deepcopy(values), "config.json"))
        except FileError:
            continue
        try:
            config = getattr(transformers, f"{CLASSES[kind]}Config").from_dict(copy.deepcopy(values))
            module = rotary(config)
            module(torch.zeros(1, 8, 32), torch.arange(8)[None], *["full_attention"] * (kind == "gemma3_text"))
        except Exception:
            continue  # transformers refuses some configs, and fails at others
        assert isinstance(spec, DecoderSpec | Gpt2Spec)
        assert same(spec, config, module), values
        compared += 1
    assert compared >= 20
