"""A Hugging Face folder that somebody else made: its names, its config.json and the headers of its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile_files import check_reader, damaged, hostile_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import FileError, InputError
from hpctrain.hf.folder import read_folder, tensors_in

pytestmark = pytest.mark.slow

MANY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
CONFIGS: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"], "vocab_size": 17, "hidden_size": 8, "intermediate_size": 16,
     "num_hidden_layers": 1, "num_attention_heads": 2, "rope_scaling": {"rope_type": "default", "rope_theta": 1e4}},
    {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 17, "hidden_size": 8, "intermediate_size": 16,
     "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "use_sliding_window": True,
     "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1,
     "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "mscale": 1.0,
                      "mscale_all_dim": 0.5, "beta_fast": 8, "truncate": False}},
    {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 17, "hidden_size": 8, "intermediate_size": 16,
     "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4, "num_key_value_heads": 1, "sliding_window": 4,
     "sliding_window_pattern": 2, "query_pre_attn_scalar": 4, "final_logit_softcapping": 5.0,
     "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2, "rope_theta": 1e6},
                         "sliding_attention": {"rope_theta": 1e4}},
     "max_position_embeddings": 64},
    {"model_type": "phi3", "vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
     "num_attention_heads": 2, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16,
     "max_position_embeddings": 64, "pad_token_id": None,
     "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}},
    {"model_type": "gpt2", "vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
    {"model_type": "bert", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": 16, "max_position_embeddings": 8},
    {"model_type": "roberta", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": 16, "max_position_embeddings": 8, "pad_token_id": 3, "type_vocab_size": 1},
    {"model_type": "opt", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "ffn_dim": 16, "max_position_embeddings": 8, "word_embed_proj_dim": 8, "pad_token_id": -1},
    {"model_type": "gpt_neox", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"model_type": "gpt_neox", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": 16, "rotary_pct": 0.5, "rotary_emb_base": 10000},
    {"model_type": "t5", "vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
]  # fmt: skip
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "c": {"dtype": "F32", "shape": [0], "data_offsets": [26, 26]},
}
DATA_BYTES = 26


def weights(header: bytes, data_bytes: int = DATA_BYTES, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data_bytes)


def changed(**entry: Any) -> bytes:
    """The header with keys of its first tensor replaced."""
    return json.dumps(HEADER | {"a": HEADER["a"] | entry}).encode()


def test_a_header_gives_its_tensors_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights(json.dumps(HEADER).encode()))
    start = 8 + len(json.dumps(HEADER))
    found = [(item.name, item.shape, item.begin - start, item.size_bytes) for item in tensors_in(path)]
    assert found == [("a", (2, 3), 0, 24), ("b", (), 24, 2), ("c", (0,), 26, 0)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (weights(b"{}", 0, 2**63), "its header claims 9223372036854775808 bytes, the file has 10"),
        (weights(b"{}", 0, 100), "its header claims 100 bytes"),
        (weights(b"[]", 0), "its header has no keys"),
        (weights(b"[" * 200_000, 0), "nested too deep"),
        (weights(changed(data_offsets=[0, 10**12])), "data_offsets hold 1000000000000 bytes, dtype and shape need 24"),
        (weights(changed(data_offsets=[24, 0])), "found data_offsets [24, 0]"),
        (weights(changed(data_offsets=[-24, 0])), "found data_offsets [-24, 0]"),
        (weights(changed(data_offsets=[2, 26])), "data_offsets begin at byte"),
        (weights(changed(data_offsets=[0, 0], shape=[0])), "data_offsets begin at byte"),
        (weights(changed(shape=[10**15, 10**15])), "found shape [1000000000000000"),
        (weights(changed(shape=[2, -3])), "found shape [2, -3]"),
        (weights(changed(shape="23")), "found shape '23'"),
        (weights(changed(shape=[True, 6])), "found shape [True, 6]"),
        (weights(changed(dtype="F99")), "found dtype 'F99'; allowed: BOOL"),
        (weights(changed(dtype=["F32"])), "found dtype ['F32']"),
        (weights(json.dumps(HEADER).encode(), 2**16), "its header says"),
        (weights(json.dumps(HEADER).encode(), 3), "its header says"),
    ],
)
def test_a_header_that_lies_is_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError) as error:
        tensors_in(path)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{path}: ")
    assert words in line
    assert line.endswith("copy the folder again")


@MANY
@given(hostile_json(HEADER), st.sampled_from([None, 0, 7, 2**40, 2**64 - 1]), st.sampled_from([DATA_BYTES, 0, 5]))
def test_any_header_is_read_or_refused(tmp_path: Path, header: bytes, length: int | None, data_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights(header, data_bytes, length))
    found = check_reader(tensors_in, path)
    for item in found if isinstance(found, list) else []:
        assert 0 <= item.begin <= item.begin + item.size_bytes <= path.stat().st_size


@MANY
@given(st.binary(max_size=60) | damaged(weights(json.dumps(HEADER).encode())))
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    check_reader(tensors_in, path)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_any_config_is_read_or_refused(number: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(b"{}", 0))
    path = tmp_path / "config.json"

    def read(path: Path) -> object:
        return read_folder(path.parent)

    path.write_text(json.dumps(CONFIGS[number]))
    with pytest.raises(FileError, match="no such tensor"):
        read(path)

    @MANY
    @given(hostile_json(CONFIGS[number]))
    def fuzz(data: bytes) -> None:
        path.write_bytes(data)
        check_reader(read, path)

    fuzz()


@MANY
@given(hostile_json({"metadata": {"total_size": 26}, "weight_map": {"a": "model.safetensors", "b": "x.safetensors"}}))
def test_any_index_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0]))
    (tmp_path / "model.safetensors").write_bytes(weights(json.dumps(HEADER).encode()))
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(data)
    check_reader(lambda path: read_folder(path.parent), path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", ".x", "a\\b", "a\0b", "x" * 300])
def test_an_index_names_only_what_lies_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (tmp_path / "model.safetensors").write_bytes(weights(json.dumps(HEADER).encode()))
    (folder / "config.json").write_text(json.dumps(CONFIGS[0]))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FileError, match=r"index\.json: weight_map: found .*copy the folder again"):
        read_folder(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("size", [10**9, 10**12])
def test_a_config_that_asks_for_too_much_is_refused_before_its_tensors_are_listed(
    key: str, size: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[0], key: size}))
    (tmp_path / "model.safetensors").write_bytes(weights(b"{}", 0))
    with pytest.raises(
        FileError, match=r"config\.json: .*(less than or equal to|allowed: a whole number above 0, up to)"
    ):
        read_folder(tmp_path)


def test_a_fifo_in_the_place_of_weights_hangs_nobody(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0]))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        read_folder(tmp_path)
    with pytest.raises(FileError, match="is a FIFO"):
        tensors_in(tmp_path / "model.safetensors")
