"""Tokenizers of published forms: corpora are made with them, and transformers gets them back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.prepare.tokenizer import ByteTokenizer, load_tokenizer
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.corpus.read.tokens import read_index
from hpctrain.hf.tokenizer import byte_tokenizer, hf_tokenizer
from hpctrain.records.run.objective import Masked, SpanCorruption

TEXT = "The model trains; the model's tokens are counted.\n" * 40


@given(st.text())
def test_bytes_are_the_same_tokens_in_both_forms(text: str) -> None:
    assert byte_tokenizer().encode(text).ids == ByteTokenizer().encode([text])[0].tolist()
    assert byte_tokenizer().token_to_id("<|endoftext|>") == ByteTokenizer.end_of_text


def published(form: str, path: Path) -> Path:
    """A tokenizer.json as those of GPT-2 and BERT are made."""
    if form == "gpt2":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    else:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    if form == "bert":
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
        tokenizer.post_processor = processors.BertProcessing(*ends)
        tokenizer.enable_truncation(16)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("form", ["bytes", "trained", "gpt2", "bert"])
def test_a_text_that_names_the_end_of_text_does_not_end_there(form: str, tmp_path: Path) -> None:
    """Each document has one end-of-text token, its last; the name of that token is text like any other."""
    end = "[SEP]" if form == "bert" else "<|endoftext|>"
    texts = [f"the model {end} trains", f"{end}{end}", f"the tokens{end}", "the text"]
    records = "".join(json.dumps({"text": text}) + "\n" for text in [TEXT, *texts])
    (tmp_path / "t.jsonl").write_text(records)
    choice = {"bytes": "bytes", "trained": "train:280"}.get(form) or str(published(form, tmp_path / "tokenizer.json"))
    prepare([tmp_path / "t.jsonl"], tmp_path / "data", PrepareOptions(tokenizer=choice, valid_fraction=0.0))
    index = read_index(tmp_path / "data")
    tokens = np.fromfile(tmp_path / "data" / "train-00000.bin", dtype="<u2")
    ends = np.flatnonzero(tokens == index.tokenizer.end_of_text)
    assert len(ends) == 1 + len(texts)
    assert ends[-1] == len(tokens) - 1
    if form == "trained":  # the others cannot tell every character
        whole = tokenizers.Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
        assert [whole.decode(list(part)) for part in np.split(tokens, ends + 1)[1:-1]] == texts


@pytest.mark.parametrize(("form", "end"), [("gpt2", "<|endoftext|>"), ("bert", "[SEP]")])
def test_a_corpus_is_made_with_a_published_tokenizer(form: str, end: str, tmp_path: Path) -> None:
    path = published(form, tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text(TEXT)
    prepare([tmp_path / "text.txt"], tmp_path / "data", PrepareOptions(tokenizer=str(path), valid_fraction=0.0))
    index = read_index(tmp_path / "data")
    whole = tokenizers.Tokenizer.from_file(str(path))
    whole.no_truncation()
    expected = [*whole.encode(TEXT, add_special_tokens=False).ids, whole.token_to_id(end)]
    shard = np.fromfile(tmp_path / "data" / index.shards[0].file, dtype=index.dtype)
    assert shard.tolist() == expected
    special = special_tokens([tmp_path / "data"], Masked(mode="masked"), 32)
    text, config = hf_tokenizer(tmp_path / "data", special, 32)
    again = tokenizers.Tokenizer.from_str(text)
    assert again.encode(TEXT, add_special_tokens=False).ids == expected[:-1]
    assert again.token_to_id("[MASK]") == special.mask
    assert (config["eos_token"], config["mask_token"]) == (end, "[MASK]")


def test_tokens_that_an_objective_adds_have_names(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare([tmp_path / "text.txt"], tmp_path / "data", PrepareOptions(tokenizer="bytes", valid_fraction=0.0))
    special = special_tokens([tmp_path / "data"], SpanCorruption(mode="span_corruption"), 64)
    text, config = hf_tokenizer(tmp_path / "data", special, 64)
    again = tokenizers.Tokenizer.from_str(text)
    assert json.loads(text)["model"]["type"] == "BPE"
    assert again.get_vocab_size() == special.vocabulary
    assert again.token_to_id("<pad>") == special.start == 257
    assert [again.token_to_id(f"<extra_id_{place}>") for place in range(len(special.sentinels))] == list(
        special.sentinels
    )
    assert config["pad_token"] == "<pad>"
    assert load_tokenizer("bytes").vocab_size == 257


def test_a_corpus_that_is_gone_has_no_tokenizer(tmp_path: Path) -> None:
    from hpctrain.base.errors import InputError
    from hpctrain.corpus.read.objective import SpecialTokens

    with pytest.raises(InputError, match="no such folder"):
        hf_tokenizer(tmp_path / "gone", SpecialTokens(257, 257, 256), 64)
