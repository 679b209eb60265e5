"""Random models of transformers that are none of our families: cut into stages, or refused if that cannot be right."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.hf.config import architecture_of
from hpctrain.model.build import build_part
from hpctrain.model.from_transformers.describe import FolderRequest, describe_folder
from hpctrain.model.from_transformers.load import build_on_meta, configuration, import_transformers
from hpctrain.model.from_transformers.stage import TransformersPart
from hpctrain.model.hf_weights import HfWeights
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.transformers_spec import TransformersSpec

pytestmark = [pytest.mark.slow, pytest.mark.requires("transformers")]

LAYERS = 3
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 97, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GATED = {**SMALL, "intermediate_size": 56, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "stablelm": GATED,
    "falcon": {**SMALL, "new_decoder_architecture": False, "alibi": False},
    "bloom": SMALL,
    "starcoder2": {**GATED, "sliding_window": 8},
    "granite": {**GATED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "cohere2": {**GATED, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "smollm3": {**GATED, "no_rope_layers": [1, 0, 1]},
    "glm": {**GATED, "head_dim": 8},
    "mpt": {"d_model": 32, "n_layers": LAYERS, "n_heads": 4, "vocab_size": 97, "max_seq_len": 64},
    "phi": {**GATED, "tie_word_embeddings": True},
    "gptj": {**SMALL, "rotary_dim": 4, "n_positions": 64},
    "llama": {**GATED, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
}
TOKENS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


def saved(kind: str, folder: Path, **more: Any) -> nn.Module:
    """transformers' own model, saved in `folder`, with numbers that leave none of its parts idle."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**MODELS.get(kind, GATED), **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def described(folder: Path) -> HfModel:
    model = describe_folder(FolderRequest(str(folder), "a test", seq_len=24, seed=0))
    return HfModel.model_validate(json.loads(json.dumps(model.to_json())))


def stages(model: HfModel, folder: Path) -> list[TransformersPart]:
    """The embedding alone, one block, two blocks, and the head alone, each with its weights from the folder."""
    fill = HfWeights(model, folder).fill
    cuts = [StageBlocks(0, 0, True, False), StageBlocks(0, 1, False, False)]
    cuts += [StageBlocks(1, LAYERS, False, False), StageBlocks(LAYERS, LAYERS, False, True)]
    made = [build_part(model.spec, cut, 0, fill) for cut in cuts]
    return [part.eval() for part in made if isinstance(part, TransformersPart)]


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_cut_model_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path)
    model = described(tmp_path)
    spec = model.spec
    assert isinstance(spec, TransformersSpec)
    x = TOKENS
    parts = stages(model, tmp_path)
    for part in parts:
        x = part(x)
    assert float((x - whole(input_ids=TOKENS).logits).abs().max()) <= 1e-6
    # Each stage holds its own weights only, and the planner's counts are those of the modules.
    held = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    ends = [(0, True, False), (1, False, False), (LAYERS - 1, False, False), (0, False, True)]
    assert held == [spec.stage_parameters(blocks, first=first, last=last) for blocks, first, last in ends]
    assert spec.parameters() == sum(parameter.numel() for parameter in whole.parameters())
    assert spec.block_sizes.flops > 0 < spec.block_sizes.activation_bytes
    # An export has the tensors that transformers saves.
    state = {name: tuple(weight.shape) for name, weight in whole.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in architecture_of(model).tensors(spec)} == state
    tied = whole.config.tie_word_embeddings
    assert spec.shared_weights([(0, 1), (1, LAYERS)]) == ({next(iter(state)): [0, 1]} if tied else {})


def test_a_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("bloom", tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    (name,) = (name for name in held if name.endswith("word_embeddings.weight"))
    save_file({**held, "lm_head.weight": held[name].clone()}, file)
    assert described(tmp_path).spec.layers == LAYERS
    save_file({**held, "lm_head.weight": held[name] + 1}, file)
    with pytest.raises(InputError, match=r"lm_head\.weight differs from transformer\.word_embeddings\.weight"):
        described(tmp_path)


def test_weights_that_a_folder_holds_once_are_not_read_for_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("stablelm", tmp_path)

    def refuse(*_: object) -> bool:
        raise AssertionError("there is nothing to compare")

    monkeypatch.setattr("hpctrain.model.from_transformers.describe.have_same_values", refuse)
    assert described(tmp_path).spec.layers == LAYERS


@torch.no_grad()
def test_a_folder_without_the_prefix_of_the_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = saved("bloom", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    x = TOKENS
    for part in stages(described(tmp_path), tmp_path):
        x = part(x)
    assert float((x - whole(input_ids=TOKENS).logits).abs().max()) <= 1e-6


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map: the folder's own code would have to run"),
        ({"sub": {"auto_map": {"AutoConfig": "evil.C"}}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be trained"),
        ({"model_type": "evil"}, "has no causal language model of this type"),
        ({"model_type": ["stablelm"]}, "has no causal language model of this type"),
        ({"architectures": ["LlamaForCausalLM"]}, "the causal language model of stablelm is StableLmForCausalLM"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: found 1000000"),
        ({"sub": [{"num_experts": 10**9}]}, "num_experts: found 1000000000; allowed: up to 65536"),
        ({"num_hidden_layers": 4000}, "num_hidden_layers: found 4000; the folder has"),
        ({"hidden_size": 10**12}, "hidden_size: found 1000000000000"),
        ({"max_position_embeddings": 2**30}, "max_position_embeddings: found 1073741824"),
        ({"intermediate_size": 57}, "has shape [56, 32]; config.json says [57, 32]"),
        ({"num_hidden_layers": 2}, "is no part of a StableLmForCausalLM"),
        ({"hidden_act": "evil"}, "its class raised KeyError"),
        ({"hidden_size": "many"}, "transformers refuses its values"),
    ],
)  # fmt: skip
def test_a_config_that_is_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    saved("stablelm", tmp_path)
    changed(tmp_path, **values)
    with pytest.raises(InputError) as caught:
        described(tmp_path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_transformers_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"not installed here; pip install '?transformers>="):
        import_transformers()


def test_no_other_code_is_chosen_by_the_config(tmp_path: Path) -> None:
    saved("stablelm", tmp_path)
    named = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel", "use_kernels": True}
    changed(tmp_path, **named, conv_kernel=3)
    made = configuration(json.loads((tmp_path / "config.json").read_text()))
    assert "someone" not in str(made._attn_implementation)
    assert not hasattr(made, "use_kernels")
    assert made.conv_kernel == 3, "a size is no choice"
    assert described(tmp_path).spec.layers == LAYERS


def test_another_version_of_transformers_is_said(tmp_path: Path) -> None:
    saved("stablelm", tmp_path)
    spec = described(tmp_path).spec
    assert isinstance(spec, TransformersSpec)
    other = spec.model_copy(update={"blocks": "model.blocks"})
    with pytest.raises(InputError, match=r"builds .* when the run was made; use the same version of transformers"):
        build_part(other, StageBlocks(0, LAYERS, True, True), 0, None)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("electra", {}, "its logits depend on later tokens"),
        ("apertus", {}, "saves the constant model.layers.0.mlp.act_fn"),
        ("mixtral", {"num_local_experts": 2}, "mixtures of experts are stored in other tensors"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "is not like block"),
        ("ctrl", {"n_layer": LAYERS, "n_embd": 32, "n_head": 4, "dff": 64}, "computes something else than whole"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(
    kind: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved(kind, tmp_path, **more)
    with pytest.raises(InputError) as caught:
        described(tmp_path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**13) | st.floats() | st.text(max_size=8) | st.just(32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "layer_types",
    "rope_parameters",
    "hidden_act",
    "vocab_size",
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), VALUES, max_size=4))
def test_any_config_is_built_without_memory_or_refused(values: dict[str, Any]) -> None:
    config = {"model_type": "stablelm", **GATED, **values}
    with contextlib.suppress(InputError):
        assert all(parameter.is_meta for parameter in build_on_meta(config).parameters())
