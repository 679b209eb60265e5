"""The stream of training sequences, and what is said when a folder cannot give one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.tokens import Corpus, check_tokenizer, open_validation, read_indexes

TEXT = "".join(f"{number:04x}" for number in range(3000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 12,000 bytes in shards of 1,000."""
    base = tmp_path_factory.mktemp("corpus")
    (base / "a.txt").write_text(TEXT)
    prepare([base / "a.txt"], base / "data", PrepareOptions(valid_fraction=0.0, shard_tokens=1000))
    return base / "data"


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a validation part."""
    base = tmp_path_factory.mktemp("split")
    (base / "a.txt").write_text("\n".join(f"line {number}" for number in range(9000)))
    prepare([base / "a.txt"], base / "data", PrepareOptions(valid_fraction=0.1))
    return base / "data"


def test_windows_are_pieces_of_the_text_that_follow_each_other(folder: Path) -> None:
    corpus = Corpus.open([folder], "train", 64)
    # (1000 − 1) // 64 in each of twelve shards, and one token in the thirteenth.
    assert corpus.windows == 12 * 15
    rows = corpus.read_windows(np.arange(corpus.windows))
    assert rows.shape == (180, 65)
    assert rows.dtype == np.int64
    for window, row in enumerate(rows):
        begin = window // 15 * 1000 + window % 15 * 64
        assert bytes(row.tolist()).decode() == TEXT[begin : begin + 65]


def test_an_epoch_has_every_window_once(folder: Path) -> None:
    corpus = Corpus.open([folder], "train", 64)
    epoch = corpus.rows(5, 0, corpus.windows)
    everything = corpus.read_windows(np.arange(corpus.windows))
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, everything.tolist()))
    assert not (epoch == everything).all()
    following = corpus.rows(5, corpus.windows, corpus.windows)
    assert sorted(map(tuple, following.tolist())) == sorted(map(tuple, everything.tolist()))


@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 10**7), cut=st.integers(0, 40))
def test_any_process_may_ask_for_any_part_of_a_batch(folder: Path, seed: int, start: int, cut: int) -> None:
    corpus = Corpus.open([folder], "train", 64)
    whole = corpus.rows(seed, start, 40)
    parts = [corpus.rows(seed, start, cut), corpus.rows(seed, start + cut, 40 - cut)]
    assert (np.concatenate(parts) == whole).all()


def test_several_folders_are_one_corpus(folder: Path, split: Path) -> None:
    both = Corpus.open([folder, split], "train", 64)
    alone = [Corpus.open([path], "train", 64) for path in (folder, split)]
    assert both.windows == alone[0].windows + alone[1].windows
    last = both.read_windows(np.array([both.windows - 1]))
    assert (last == alone[1].read_windows(np.array([alone[1].windows - 1]))).all()


def test_the_splits_are_apart(split: Path) -> None:
    train, valid, everything = (Corpus.open([split], name, 32) for name in ("train", "valid", "all"))
    assert everything.tokens == train.tokens + valid.tokens
    lines = [
        {
            line
            for row in c.read_windows(np.arange(c.windows))
            for line in bytes(row % 256).decode("latin").split("\n")[1:-1]
        }
        for c in (train, valid)
    ]
    assert lines[1]
    assert not lines[0] & lines[1]


def test_validation_is_what_is_named_else_what_was_kept_aside_else_nothing(folder: Path, split: Path) -> None:
    kept = open_validation([split], [], 32)
    assert kept is not None
    assert kept.windows == Corpus.open([split], "valid", 32).windows
    named = open_validation([split], [str(folder)], 32)
    assert named is not None
    assert named.windows == Corpus.open([folder], "all", 32).windows
    assert open_validation([folder], [], 32) is None


def test_too_little_text_is_told(folder: Path) -> None:
    with pytest.raises(
        InputError, match=r"found 12001 tokens in the train split.*sequence of 5000.*lower data.seq_len"
    ):
        Corpus.open([folder], "train", 5000)
    with pytest.raises(InputError, match="found 0 tokens in the valid split"):
        Corpus.open([folder], "valid", 64)


def test_a_missing_folder_is_told_with_its_field_and_the_next_thing_to_do(tmp_path: Path, folder: Path) -> None:
    missing = tmp_path / "data"
    with pytest.raises(InputError) as caught:
        read_indexes([str(folder), str(missing)])
    assert str(caught.value) == (
        f"data.train[1]: {missing}: no such folder; make it with `hpctrain data prepare IN... -o {missing}`"
    )
    missing.mkdir()
    with pytest.raises(InputError, match=r"data\.train\[0\]: .*: found no index\.json in it"):
        read_indexes([missing])
    with pytest.raises(InputError, match=r"data\.train: found no folder"):
        read_indexes([])


def test_folders_with_other_tokens_are_not_mixed(tmp_path: Path, folder: Path) -> None:
    assert read_indexes([folder])[0].vocab_size == 257
    (tmp_path / "a.txt").write_text("some words " * 500)
    prepare([tmp_path / "a.txt"], tmp_path / "bpe", PrepareOptions("train:260"))
    message = (
        r"data\.train\[1\]: .*its tokenizer \(trained [0-9a-f]{8}, vocabulary 260\) is not that of .*--tokenizer bytes"
    )
    with pytest.raises(InputError, match=message):
        read_indexes([folder, tmp_path / "bpe"])
    with pytest.raises(InputError, match=rf"data\.valid\[0\]: .*--tokenizer {tmp_path}/bpe/tokenizer\.json"):
        open_validation([tmp_path / "bpe"], [folder], 8)


@pytest.mark.parametrize("damage", ["short", "missing", "index"])
def test_a_damaged_folder_is_told(tmp_path: Path, folder: Path, damage: str) -> None:
    copy = tmp_path / "data"
    shutil.copytree(folder, copy)
    shard = copy / "train-00003.bin"
    if damage == "short":
        shard.write_bytes(shard.read_bytes()[:-2])
        message = r"index\.json: shards\[3\]: train-00003\.bin has 1998 bytes, expected 2000; prepare the folder again"
    elif damage == "missing":
        shard.unlink()
        message = r"index\.json: shards\[3\]: train-00003\.bin: cannot read: No such file or directory"
    else:
        (copy / "index.json").write_text('{"vocab_size": 257')
        message = r"index\.json:1: not valid JSON"
    with pytest.raises(FileError, match=message):
        Corpus.open([copy], "train", 64)


def test_a_named_tokenizer_must_be_that_of_the_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five\n" * 2000)
    prepare([text], tmp_path / "data", PrepareOptions(tokenizer="train:300"))
    check_tokenizer([tmp_path / "data"], tmp_path / "data" / "tokenizer.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match=r"data\.tokenizer: .*other\.json: the data was made with another tokenizer"):
        check_tokenizer([tmp_path / "data"], tmp_path / "other.json")
    with pytest.raises(InputError, match="no such file"):
        check_tokenizer([tmp_path / "data"], tmp_path / "missing.json")
