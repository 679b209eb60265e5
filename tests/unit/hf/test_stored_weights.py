"""Which tensors of a Hugging Face folder are the model: of copies, of files, under which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.base.errors import FileError, InputError
from hpctrain.hf.config import architecture
from hpctrain.hf.folder import read_folder
from hpctrain.model.build import build_part
from hpctrain.model.hf_weights import HfWeights
from hpctrain.model.layers import StageBlocks

SIZES: dict[str, Any] = {
    "vocab_size": 17, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **SIZES},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **SIZES, "num_key_value_heads": 1, "head_dim": 4},
    "gpt2": {"model_type": "gpt2", "vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.5},
    "opt": {"model_type": "opt", **SIZES, "ffn_dim": 16, "max_position_embeddings": 8},
    "bert": {"model_type": "bert", **SIZES, "max_position_embeddings": 8},
    "roberta": {"model_type": "roberta", **SIZES, "max_position_embeddings": 8},
    "t5": {"model_type": "t5", "vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}
COPIES = [
    ("llama", "lm_head.weight", "model.embed_tokens.weight"),
    ("gemma2", "lm_head.weight", "model.embed_tokens.weight"),
    ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ("gpt_neox", "embed_out.weight", "gpt_neox.embed_in.weight"),
    ("opt", "lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("roberta", "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("t5", "lm_head.weight", "shared.weight"),
    ("t5", "decoder.embed_tokens.weight", "shared.weight"),
]


def tensors(kind: str, fill: float = 1.0) -> dict[str, torch.Tensor]:
    """The tensors of a model with the config of that name, as its folder holds them."""
    row = architecture(CONFIGS[kind], "config.json")
    spec = row.read(config_keys(kind))
    return {tensor.name: torch.full(tensor.shape, fill) for tensor in row.tensors(spec)}


def config_keys(kind: str) -> Any:
    from hpctrain.hf.config_keys import ConfigKeys

    return ConfigKeys(CONFIGS[kind], "config.json")


def folder(path: Path, kind: str, held: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_file(held, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("kind", "copy", "name"), COPIES)
def test_a_copy_of_a_tied_matrix_is_the_matrix_or_refused(kind: str, copy: str, name: str, tmp_path: Path) -> None:
    held = tensors(kind)
    expected = read_folder(folder(tmp_path, kind, held)).dims
    assert read_folder(folder(tmp_path, kind, {**held, copy: held[name].clone()})).dims == expected
    other = held[name].clone()
    other.view(-1)[-1] = 2
    with pytest.raises(FileError) as refused:
        read_folder(folder(tmp_path, kind, {**held, copy: other}))
    assert f"{copy}: differs from {name}, but config.json ties the two" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("kind", "copy", "name"), COPIES)
def test_a_tied_matrix_may_have_the_name_of_its_copy(kind: str, copy: str, name: str, tmp_path: Path) -> None:
    held = tensors(kind)
    held[copy] = 3 * held.pop(name)
    found = read_folder(folder(tmp_path, kind, held))
    fill = HfWeights(found, tmp_path).fill
    module = build_part(found.dims, StageBlocks(0, found.dims.layers, True, True), seed=0, fill=fill)
    assert module.get_parameter("head.bias" if copy.endswith("bias") else "embedding.weight").eq(3).all()


def test_a_file_beside_an_index_is_the_model(tmp_path: Path) -> None:
    folder(tmp_path, "llama", tensors("llama"))
    shard, index = tmp_path / "model-00001-of-00001.safetensors", tmp_path / "model.safetensors.index.json"
    save_file(tensors("llama", 2.0), shard)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors("llama"), shard.name)}))
    found = read_folder(tmp_path)
    fill = HfWeights(found, tmp_path).fill
    module = build_part(found.dims, StageBlocks(0, 1, True, True), seed=0, fill=fill)
    assert module.get_parameter("embedding.weight").eq(1).all()
    (tmp_path / "model.safetensors").unlink()
    assert read_folder(tmp_path).weights_sha256 != found.weights_sha256


def test_an_index_without_tensors_is_one_line(tmp_path: Path) -> None:
    folder(tmp_path, "llama", tensors("llama"))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(InputError) as refused:
        read_folder(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/model.safetensors.index.json: weight_map: found {{}}; a table of tensors and files is expected; "
        "copy the folder again"
    )
