"""Random models that transformers itself builds and saves, in our words and back again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.config import architecture_for, architecture_of, config_of, continued_config
from hpctrain.hf.config_keys import ConfigKeys
from hpctrain.hf.folder import read_folder
from hpctrain.hf.tensors import assign_to_shards, index_of
from hpctrain.model.build import build_part
from hpctrain.model.hf_weights import HfWeights, to_hf_tensor
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.families import FamilySpec

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_theta": 5e5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9}
PHI = {"pad_token_id": 1, "sliding_window": 17}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
PHI4 = {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32}
"""Texts of 40 tokens are long ones."""
GPT2: dict[str, Any] = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
BERT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
    "max_position_embeddings": 64,
}  # fmt: skip
ROBERTA: dict[str, Any] = {**BERT, "max_position_embeddings": 50, "type_vocab_size": 1}
OPT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 56,
    "max_position_embeddings": 40,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "d_kv": 6, "d_ff": 56, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama:ForCausalLM", LLAMA),
    "llama-tied": ("Llama:ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "llama-padded": ("Llama:ForCausalLM", {**LLAMA, "pad_token_id": 5}),
    "llama-3.1": ("Llama:ForCausalLM", {**LLAMA, "rope_scaling": LLAMA3, "attention_bias": True, "head_dim": 6}),
    "llama-linear": ("Llama:ForCausalLM", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral:ForCausalLM", {**LLAMA, "sliding_window": None}),
    "mistral-window": ("Mistral:ForCausalLM", {**LLAMA, "sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2:ForCausalLM", LLAMA),
    "qwen2-yarn": ("Qwen2:ForCausalLM", {**LLAMA, "rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2:ForCausalLM", {**LLAMA, **QWEN_WINDOW}),
    "qwen3": ("Qwen3:ForCausalLM", {**LLAMA, "head_dim": 12}),
    "gemma2": ("Gemma2:ForCausalLM", {**LLAMA, **GEMMA}),
    "gemma3": ("Gemma3:ForCausalLM", {**LLAMA, **GEMMA, "num_hidden_layers": 7}),
    "gemma3-scaled": (
        "Gemma3:ForCausalLM",
        {**LLAMA, **GEMMA, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3-full": ("Gemma3:ForCausalLM", {**LLAMA, **GEMMA, "layer_types": ["full_attention"] * 3}),
    "phi3": ("Phi3:ForCausalLM", {**LLAMA, **PHI}),
    "phi4-mini": ("Phi3:ForCausalLM", {**LLAMA, **PHI, **PHI4}),
    "phi3-short": (
        "Phi3:ForCausalLM",
        {
            **LLAMA,
            **PHI,
            "rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4},
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
        },
    ),
    "olmo2": ("Olmo2:ForCausalLM", LLAMA),
    "gpt2": ("GPT2:LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2:LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "opt": ("OPT:ForCausalLM", OPT),
    "opt-untied-gelu": ("OPT:ForCausalLM", {**OPT, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt-neox": ("GPTNeoX:ForCausalLM", NEOX),
    "gpt-neox-serial-tied": (
        "GPTNeoX:ForCausalLM",
        {**NEOX, "tie_word_embeddings": True, "use_parallel_residual": False, "rope_parameters": None},
    ),
    "bert": ("Bert:ForMaskedLM", BERT),
    "bert-untied": ("Bert:ForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "roberta": ("Roberta:ForMaskedLM", ROBERTA),
    "roberta-untied": ("Roberta:ForMaskedLM", {**ROBERTA, "tie_word_embeddings": False, "pad_token_id": 4}),
    "xlm-roberta": ("XLMRoberta:ForMaskedLM", ROBERTA),
    "bert-two-heads": ("Bert:ForPreTraining", BERT),
    "t5": ("T5:ForConditionalGeneration", T5),
    "t5-v1.1": ("T5:ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
TOKENS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
DECODED = torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(2))


def built(case: str) -> nn.Module:
    """transformers' own model with numbers that leave none of its parts idle."""
    import transformers

    name, settings = CASES[case]
    kind, _, head = name.partition(":")
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**settings)
    config._attn_implementation = "eager"  # the fused one has no soft cap
    model = getattr(transformers, kind + head)(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale_of_norm = parameter.dim() == 1 and kind not in ("Gemma2", "Gemma3")  # Gemma adds 1 itself
        parameter.data.normal_(float(scale_of_norm), 0.3, generator=generator)
    return model


@torch.no_grad()
def theirs(model: nn.Module) -> torch.Tensor:
    named = {"decoder_input_ids": DECODED} if model.config.model_type == "t5" else {}
    found = model(input_ids=TOKENS, **named)
    return found.prediction_logits if hasattr(found, "prediction_logits") else found.logits


def deviation(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def ours(spec: FamilySpec, fill: Callable[[nn.Module], None]) -> torch.Tensor:
    """Logits of the model in as many stages as it has blocks: each is filled by itself."""
    x, named = TOKENS, {"decoder_tokens": DECODED} if spec.family == "encoder_decoder" else {}
    for start in range(spec.layers):
        last = start == spec.layers - 1
        x = build_part(spec, StageBlocks(start, start + 1, start == 0, last), seed=0, fill=fill)(x, **named)
    return x


def exported(spec: FamilySpec, module: nn.Module, folder: Path, limit: int) -> Path:
    """A folder of a whole model, as the export writes it."""
    folder.mkdir()
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    files = assign_to_shards(architecture_for(spec).tensors(spec), 4, limit)
    for name, tensors in files.items():
        held = {tensor.name: to_hf_tensor(tensor, [own[part] for part in tensor.parameters]) for tensor in tensors}
        save_file(held, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(files, 0)))
    (folder / "config.json").write_text(json.dumps(config_of(spec, 64, SpecialTokens(100, 100, 1, start=0))))
    return folder


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("case", CASES)
def test_logits_agree_both_ways(case: str, tmp_path: Path) -> None:
    import transformers

    model = built(case)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    found = read_folder(tmp_path / "in")
    weights = HfWeights(found, tmp_path / "in")
    assert found.dims.vocab == 97
    assert deviation(ours(found.dims, weights.fill), theirs(model)) <= TOLERANCE
    whole = build_part(found.dims, StageBlocks(0, found.dims.layers, True, True), seed=5)
    out = exported(found.dims, whole, tmp_path / "out", 30_000)
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    loaded, report = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        named = {"decoder_tokens": DECODED} if found.dims.family == "encoder_decoder" else {}
        assert deviation(whole(TOKENS, **named), theirs(loaded.eval())) <= TOLERANCE
    again = read_folder(out)
    assert again.dims == found.dims
    # A run that started from the folder is exported with the folder's config.json, changed where it must be.
    config = continued_config(found.config, found.dims, 64)
    assert architecture_of(found).read(ConfigKeys(config, "config.json")) == found.dims


INNER = {**LONGROPE, "original_max_position_embeddings": 16}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi4-mini": ("a length inside only", {"rope_scaling": INNER, "original_max_position_embeddings": None}),
    "phi3-short": ("no length", {"original_max_position_embeddings": None, "max_position_embeddings": None}),
    "gpt-neox": ("both keys", {"rope_scaling": {"rope_theta": 333.0, "partial_rotary_factor": 1.0}}),
    "gemma3-scaled": ("both keys", {"rope_parameters": NESTED, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen2-yarn": (
        "a factor from lengths",
        {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 80},
    ),
}
"""Case -> what of its config.json is different, and its keys; None takes a key away."""


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("case", DEFAULTS)
def test_keys_have_the_priority_and_the_defaults_of_transformers(case: str, tmp_path: Path) -> None:
    model = built(case)
    model.save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text()) | DEFAULTS[case][1]
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    found = read_folder(tmp_path / "in")
    again = type(model).from_pretrained(tmp_path / "in", attn_implementation="eager").eval()
    assert deviation(theirs(again), theirs(model)) > 1e-3, "the change has no effect"
    assert deviation(ours(found.dims, HfWeights(found, tmp_path / "in").fill), theirs(again)) <= TOLERANCE


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without transformers: our own GPT-2, seeded."""
    from hpctrain.records.model.families import Gpt2Spec

    spec = Gpt2Spec(layers=2, dim=16, heads=2, vocab=50, positions=32, ffn_dim=64)
    module = build_part(spec, StageBlocks(0, 2, True, True), seed=1)
    return exported(spec, module, tmp_path_factory.mktemp("hf") / "gpt2", 1 << 30)


def changed(folder: Path, copy: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with other tensors; None takes one away."""
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, copy / "model.safetensors")
    return copy


def test_early_names_and_short_numbers_are_read(gpt2: Path, tmp_path: Path) -> None:
    found = read_folder(gpt2)
    held = load_file(gpt2 / "model.safetensors")
    early = {name.removeprefix("transformer."): tensor.bfloat16() for name, tensor in held.items()}
    early |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "lm_head.weight": held["transformer.wte.weight"].bfloat16()}
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    save_file({name: tensor.clone() for name, tensor in early.items()}, tmp_path / "model.safetensors")
    module = build_part(
        found.dims, StageBlocks(0, 2, True, True), seed=0, fill=HfWeights(read_folder(tmp_path), tmp_path).fill
    )
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    expected = held["transformer.h.1.attn.c_attn.weight"][:, 16:32].t().bfloat16().float()
    assert torch.equal(module.get_parameter("layers.1.attention.wk.weight"), expected)


def test_tensors_that_do_not_fit_are_named(gpt2: Path, tmp_path: Path) -> None:
    copy = partial(changed, gpt2)
    for number, (tensors, said) in enumerate([
        ({"transformer.ln_f.bias": None}, "transformer.ln_f.bias: no such tensor; config.json says it has shape [16]"),
        ({"score.weight": torch.ones(2)}, "score.weight: no part of a GPT2LMHeadModel here"),
        ({"transformer.wpe.weight": torch.ones(8, 16)}, "found shape [8, 16]; config.json says [32, 16]"),
        ({"transformer.ln_f.bias": torch.ones(16, dtype=torch.int8)}, "found numbers of type I8"),
    ]):  # fmt: skip
        folder = copy(tmp_path / str(number), **tensors)
        with pytest.raises(InputError) as refused:
            read_folder(folder)
        assert said in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_weights_that_changed_since_are_refused(gpt2: Path, tmp_path: Path) -> None:
    found = read_folder(gpt2)
    HfWeights(found, gpt2)
    copy = changed(gpt2, tmp_path / "other", **{"transformer.ln_f.bias": torch.ones(16)})
    with pytest.raises(InputError, match="not those that were there when the run was made"):
        HfWeights(found, copy)


def test_files_that_are_no_weights_are_refused(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"has no model\.safetensors and no .*; copy the folder again"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"has no model\.safetensors.*, a pickle"):
        read_folder(tmp_path)
    whole = (gpt2 / "model.safetensors").read_bytes()
    no_format = "not a safetensors file"
    for data, said in ((b"", no_format), (b"\xff" * 64, no_format), (whole[:-4], "bytes, its header says")):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(InputError, match=said):
            read_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(InputError, match="weight_map"):
        read_folder(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_folder(tmp_path / "nowhere")


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("case", ["llama-padded", "bert", "bert-untied", "roberta", "roberta-untied"])
def test_the_row_of_the_padding_gets_the_gradient_of_transformers(case: str, tmp_path: Path) -> None:
    """No gradient from inputs, though the token is among them; with a tied head, that of the softmax."""
    model = built(case)
    model.save_pretrained(tmp_path / "in")
    found = read_folder(tmp_path / "in")
    padding, tokens = model.config.pad_token_id, TOKENS.clone()
    tokens[0, 3:5] = padding
    assert found.dims.padding_id == padding
    fill = HfWeights(found, tmp_path / "in").fill
    part = build_part(found.dims, StageBlocks(0, found.dims.layers, True, True), seed=0, fill=fill)
    for logits in (part(tokens), model(input_ids=tokens).logits):
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten()).backward()
    for tensor in architecture_for(found.dims).tensors(found.dims):
        if tensor.parameters[0] in ("embedding.weight", "positions.weight"):
            gradient, expected = (
                module.get_parameter(name).grad for module, name in ((part, tensor.parameters[0]), (model, tensor.name))
            )
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    gradient = part.get_parameter("embedding.weight").grad
    assert gradient is not None
    assert bool(gradient[padding].any()) == found.dims.tied
