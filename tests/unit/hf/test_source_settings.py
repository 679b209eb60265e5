"""What an export keeps of the settings of the folder that a run started from, and what it does with damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_files import check_reader, hostile_json
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken

from hpctrain.base.errors import FileError
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.source_settings import SourceSettings, read_source_settings, with_end
from hpctrain.hf.tokenizer import byte_tokenizer, hf_tokenizer

CONFIG: dict[str, Any] = {
    "auto_map": {"AutoTokenizer": "code.py"}, "tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": {"9": {}},
    "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "<|eot_id|>", "unk_token": "<unk>",
    "add_bos_token": True, "model_max_length": 512, "padding_side": "left", "chat_template": "{{ messages }}",
    "extra_special_tokens": ["<|eot_id|>", "<image>"], "additional_special_tokens": {"image": "<image>"},
}  # fmt: skip


def write(folder: Path, **files: Any) -> Path:
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of the byte tokenizer with tokens for the begin (257), padding (258) and end of a turn (259)."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<pad>", "<|eot_id|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("The model trains.\n" * 40)
    options = PrepareOptions(tokenizer=str(tmp_path / "tokenizer.json"), valid_fraction=0.0)
    prepare([tmp_path / "text.txt"], tmp_path / "data", options)
    return tmp_path / "data"


def test_the_tokenizer_keeps_what_fits_the_data(corpus: Path, tmp_path: Path) -> None:
    source = read_source_settings(write(tmp_path, tokenizer_config=CONFIG, special_tokens_map={"cls_token": "<s>"}))
    _, values = hf_tokenizer(corpus, SpecialTokens(260, 260, 256), 64, source, {"pad_token_id": 258, "bos_token_id": 1})
    assert values == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
        "bos_token": CONFIG["bos_token"],
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "<|endoftext|>",
        "add_bos_token": True,
        "padding_side": "left",
        "chat_template": "{{ messages }}",
        "extra_special_tokens": ["<|eot_id|>"],
        "additional_special_tokens": {},
    }
    # A byte is no special token, though a config.json may have its number: it would no longer be a byte of text.
    _, values = hf_tokenizer(corpus, SpecialTokens(260, 260, 256), 64, None, {"pad_token_id": 1, "bos_token_id": 257})
    assert values["bos_token"] == "<s>"
    assert "pad_token" not in values


def test_generation_ends_where_the_data_does(tmp_path: Path) -> None:
    values = {"eos_token_id": [256, 259], "temperature": 0.6, "transformers_version": "4.1", "bos_token_id": 257}
    source = read_source_settings(write(tmp_path, generation_config=values))
    config = {"eos_token_id": 256, "bos_token_id": 3, "pad_token_id": 258, "decoder_start_token_id": None}
    kept = {"eos_token_id": [256, 259], "temperature": 0.6, "bos_token_id": 257, "pad_token_id": 258}
    assert source.generation_config(config, end=256) == kept
    assert source.generation_config({**config, "eos_token_id": 7}, end=7) == {**kept, "eos_token_id": 7}
    plain = {"bos_token_id": 3, "eos_token_id": 256, "pad_token_id": 258}
    assert SourceSettings().generation_config(config, end=256) == plain
    assert [with_end(value, 256, "other") for value in (256, [259, 256], [259], None, {"a": 1})] == [
        256, [259, 256], "other", "other", "other",
    ]  # fmt: skip


def test_damaged_settings_are_one_line_and_absent_ones_are_none(tmp_path: Path) -> None:
    assert read_source_settings(tmp_path / "gone") == SourceSettings()
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(FileError, match=r"generation_config\.json: found no keys; copy the file again, or remove it"):
        read_source_settings(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").symlink_to("/dev/zero")
    with pytest.raises(FileError, match=r"chat_template\.jinja: "):
        read_source_settings(tmp_path)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile_json(CONFIG))
def test_any_settings_are_kept_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    found = check_reader(read_source_settings, tmp_path)
    if isinstance(found, SourceSettings):
        vocabulary = byte_tokenizer().get_vocab(with_added_tokens=True)
        json.dumps(found.tokenizer_config(vocabulary.__contains__), allow_nan=False)
