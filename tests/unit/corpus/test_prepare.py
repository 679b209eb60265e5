"""A corpus folder: what is in it, that it is the same twice, and that a failure leaves nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import HpctrainError, InputError, StorageError
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.prepare.tokenizer import END_OF_TEXT, load_tokenizer
from hpctrain.records.corpus import CorpusIndex

ONE_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=10
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Forty documents, 36 kB in all."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"The document {number} says naïve things.\n" * 24)
    return folder


def tokens(folder: Path, index: CorpusIndex, split: str) -> np.ndarray:
    shards = [np.fromfile(folder / s.file, dtype=index.dtype) for s in index.shards if s.split == split]
    return np.concatenate(shards) if shards else np.empty(0, dtype=index.dtype)


def documents(stream: np.ndarray, end: int) -> list[bytes]:
    text = bytes(0 if token == end else token for token in stream.tolist())
    return text.split(b"\0")[:-1]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_byte_tokens_are_the_text_each_document_ended(text: Path, tmp_path: Path) -> None:
    index = prepare([text], tmp_path / "out", PrepareOptions(valid_fraction=0.2))
    assert (index.vocab_size, index.dtype, index.tokenizer.kind, index.tokenizer.file) == (257, "uint16", "bytes", None)
    assert index == CorpusIndex.read(tmp_path / "out" / "index.json")
    found = [documents(tokens(tmp_path / "out", index, split), 256) for split in ("train", "valid")]
    assert sorted(found[0] + found[1]) == sorted(path.read_bytes() for path in text.iterdir())
    assert 0 < len(found[1]) <= 8
    assert index.sources.files == 40
    assert index.sources.text_bytes == sum(path.stat().st_size for path in text.iterdir())


def test_a_long_document_is_split_and_its_pieces_are_ended(tmp_path: Path) -> None:
    lines = [f"line {number} of a long document\n" for number in range(2000)]
    (tmp_path / "long.txt").write_text("".join(lines))
    index = prepare([tmp_path / "long.txt"], tmp_path / "out", PrepareOptions(valid_fraction=0.05))
    train = documents(tokens(tmp_path / "out", index, "train"), 256)
    valid = documents(tokens(tmp_path / "out", index, "valid"), 256)
    assert valid
    assert sorted(b"".join(train + valid).decode().splitlines(keepends=True)) == sorted(lines)
    # Where a piece was taken out, the text before does not run on into the text after.
    whole = "".join(lines).encode()
    assert all(piece in whole for piece in train + valid)
    assert index.tokens("valid") / (index.tokens("train") + index.tokens("valid")) == pytest.approx(0.05, abs=0.03)


@ONE_FOLDER
@given(shard_tokens=st.integers(100, 5000))
def test_shards_are_bounded_and_hold_the_same_tokens(tmp_path: Path, shard_tokens: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words in a row\n" * 500)
    out = tmp_path / "out"
    index = prepare([path], out, PrepareOptions(valid_fraction=0, force=True, shard_tokens=shard_tokens))
    assert [shard.file for shard in index.shards] == [f"train-{n:05d}.bin" for n in range(len(index.shards))]
    assert all(shard.tokens == shard_tokens for shard in index.shards[:-1])
    assert 0 < index.shards[-1].tokens <= shard_tokens
    assert documents(tokens(out, index, "train"), 256) == [path.read_bytes()]
    for shard in index.shards:
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_the_same_text_gives_the_same_folder_in_any_order_of_inputs(text: Path, tmp_path: Path, tokenizer: str) -> None:
    files = sorted(text.iterdir())
    prepare(files, tmp_path / "one", PrepareOptions(tokenizer))
    prepare(files[::-1], tmp_path / "other", PrepareOptions(tokenizer))
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "other")


def test_a_trained_tokenizer_reads_its_own_shards_back(text: Path, tmp_path: Path) -> None:
    index = prepare([text], tmp_path / "out", PrepareOptions("train:300", valid_fraction=0))
    assert index.tokenizer.kind == "trained"
    assert index.vocab_size <= 300
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.token_to_id(END_OF_TEXT) == index.tokenizer.end_of_text
    back = tokenizer.decode(tokens(tmp_path / "out", index, "train").tolist(), skip_special_tokens=False)
    assert back.split(END_OF_TEXT)[:-1] == [path.read_text() for path in sorted(text.iterdir())]
    assert index.tokens("train") < index.sources.text_bytes / 2
    digest = hashlib.sha256((tmp_path / "out" / "tokenizer.json").read_bytes()).hexdigest()
    assert digest == index.tokenizer.sha256


def test_a_given_tokenizer_makes_the_tokens_of_the_folder_it_came_from(text: Path, tmp_path: Path) -> None:
    first = prepare([text], tmp_path / "one", PrepareOptions("train:300"))
    second = prepare([text], tmp_path / "two", PrepareOptions(str(tmp_path / "one" / "tokenizer.json")))
    assert second.tokenizer.kind == "given"
    assert [shard.sha256 for shard in second.shards] == [shard.sha256 for shard in first.shards]
    assert second.tokenizer.sha256 == first.tokenizer.sha256


def test_a_given_tokenizer_neither_cuts_nor_fills_up(text: Path, tmp_path: Path) -> None:
    prepare([text], tmp_path / "one", PrepareOptions("train:300"))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cutting.json"))
    sample = "The document says many things, more than five tokens of them."
    (encoded,) = load_tokenizer(str(tmp_path / "cutting.json")).encode([sample])
    assert tokenizer.decode(encoded.tolist()) == sample


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    vocabulary = {END_OF_TEXT: 0, "[UNK]": 1, "word": 70_000}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("word other word")
    index = prepare([tmp_path / "a.txt"], tmp_path / "out", PrepareOptions(str(tmp_path / "t.json")))
    assert (index.dtype, index.vocab_size) == ("uint32", 70_001)
    assert tokens(tmp_path / "out", index, "train").tolist() == [70_000, 1, 70_000, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            PrepareOptions("train:10"),
            "--tokenizer train:10: found '10' after train:, allowed: a number from 257 to 32768",
        ),
        (PrepareOptions("train:many"), "--tokenizer train:many: found 'many'"),
        (
            PrepareOptions("gpt2"),
            "--tokenizer gpt2: no such file; allowed: bytes, train:N, or the path of a tokenizer.json",
        ),
        (PrepareOptions(valid_fraction=1.0), "--valid-fraction: found 1, allowed: from 0 to below 1"),
        (PrepareOptions(limit_bytes=0), "--limit-bytes: found 0, allowed: 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_told_before_any_work(
    text: Path, tmp_path: Path, options: PrepareOptions, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        prepare([text], tmp_path / "out", options)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_tokenizer_is_told(text: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json of the tokenizers library"):
        prepare([text], tmp_path / "out", PrepareOptions(str(tmp_path / "t.json")))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "t.json"))
    with pytest.raises(InputError, match=r"has no token that ends a document; looked for <\|endoftext\|>"):
        prepare([text], tmp_path / "out", PrepareOptions(str(tmp_path / "t.json")))


def test_no_text_at_all_is_told_with_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(
        InputError, match=r"found no text \(1 .* first: .*a\.txt: binary.*\); taken from folders are \.md .*\.parquet"
    ):
        prepare([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_lies_in_the_way_is_kept_unless_forced(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([text], out)
    before = snapshot(out)
    with pytest.raises(InputError, match="holds a corpus already; add --force to replace it"):
        prepare([text], out, PrepareOptions("train:300"))
    assert snapshot(out) == before
    prepare([text], out, PrepareOptions("train:300", force=True))
    assert "tokenizer.json" in snapshot(out)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "out"}


def test_force_never_replaces_what_is_no_corpus(text: Path, tmp_path: Path) -> None:
    before = snapshot(text)
    with pytest.raises(InputError, match="the folder is not empty and holds no corpus; name a new folder"):
        prepare([text], text, PrepareOptions(force=True))
    assert snapshot(text) == before
    with pytest.raises(InputError, match="found a file; name a new folder"):
        prepare([text], text / "00.txt", PrepareOptions(force=True))


def test_an_empty_or_linked_folder_is_filled(text: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prepare([text], tmp_path / "link")
    assert (tmp_path / "real" / "index.json").is_file()
    assert (tmp_path / "link").is_symlink()


SmallFiles = Callable[[int], AbstractContextManager[None]]


def test_a_full_disk_is_one_line_and_the_same_call_goes_on(text: Path, tmp_path: Path, small_files: SmallFiles) -> None:
    out = tmp_path / "sub" / "out"
    with small_files(8192), pytest.raises(StorageError, match=r"out: cannot write: .*the same command goes on"):
        prepare([text], out)
    assert {path.name for path in out.parent.iterdir()} == {"out.partial"}
    prepare([text], out)
    prepare([text], tmp_path / "other")
    assert snapshot(out) == snapshot(tmp_path / "other")
    assert {path.name for path in out.parent.iterdir()} == {"out"}


def test_a_full_disk_keeps_the_corpus_that_was_there(text: Path, tmp_path: Path, small_files: SmallFiles) -> None:
    out = tmp_path / "out"
    prepare([text], out)
    before = snapshot(out)
    with small_files(8192), pytest.raises(StorageError):
        prepare([text], out, PrepareOptions("train:300", force=True))
    assert snapshot(out) == before


def interrupted(text: Path, out: Path, options: PrepareOptions, bytes_encoded: int) -> None:
    """Ends in the middle of encoding."""

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "encoding" and done >= bytes_encoded:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([text], out, options, interrupt)


def test_work_that_failed_for_another_reason_than_its_input_is_kept(text: Path, tmp_path: Path) -> None:
    """A worker that ran out of memory, say: with fewer workers the same command goes on."""

    def fail(phase: str, done: int, total: int) -> None:
        if phase == "encoding" and done >= 20_000:
            raise HpctrainError("a worker was killed by signal 9")

    with pytest.raises(HpctrainError, match="signal 9"):
        prepare([text], tmp_path / "out", PrepareOptions("train:300", unit_bytes=6000, workers=1), fail)
    assert list((tmp_path / "out.partial" / "source-0").glob("unit-*"))


def test_after_an_interrupt_units_that_are_finished_are_kept(text: Path, tmp_path: Path) -> None:
    options = PrepareOptions("train:300", unit_bytes=6000, workers=1)
    prepare([text], tmp_path / "whole", options)
    interrupted(text, tmp_path / "out", options, 20_000)
    assert not (tmp_path / "out").exists()
    source = tmp_path / "out.partial" / "source-0"
    units = sorted(path for path in source.iterdir() if path.name.startswith("unit-") and path.suffix != ".tmp")
    assert len(units) >= 2
    # One that was damaged since is made again, one that is whole is not touched.
    (units[0] / "train-00000.bin").write_bytes(b"other")
    kept = (units[1] / "train-00000.bin").stat().st_ino
    prepare([text], tmp_path / "out", options)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert kept in {path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out.partial").exists()


def test_unfinished_work_of_another_command_is_dropped_only_by_force(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(text, out, PrepareOptions(unit_bytes=6000, workers=1), 0)
    with pytest.raises(InputError, match=r"unfinished work of another command \(tokenizer differs\); give"):
        prepare([text], out, PrepareOptions("train:300", unit_bytes=6000))
    (text / "00.txt").write_text("other")
    with pytest.raises(InputError, match="input files differs"):
        prepare([text], out, PrepareOptions(unit_bytes=6000))
    prepare([text], out, PrepareOptions(force=True))
    assert (out / "index.json").is_file()
    assert not (tmp_path / "out.partial").exists()


def test_an_error_of_the_input_leaves_no_unfinished_work(text: Path, tmp_path: Path) -> None:
    """Mended input, or another option, is another command: what was left would only block it."""
    out = tmp_path / "out"
    (text / "bad.jsonl").write_text("no json\n")
    with pytest.raises(InputError, match="--skip-bad"):
        prepare([text], out)
    assert not (tmp_path / "out.partial").exists()
    (text / "bad.jsonl").write_text('{"text": "mended"}\n')
    assert prepare([text], out).sources.documents == 1


def test_one_document_of_one_passage_over_and_over_is_mostly_trained_on(tmp_path: Path) -> None:
    (tmp_path / "endless.txt").write_text("a" * 1_000_001)
    index = prepare([tmp_path / "endless.txt"], tmp_path / "out")
    assert 0 < index.tokens("valid") < index.tokens("train")


def test_two_commands_never_make_the_same_folder(text: Path, tmp_path: Path) -> None:
    def again(phase: str, done: int, total: int) -> None:
        prepare([text], tmp_path / "out")

    with pytest.raises(InputError, match="another command is making this corpus now"):
        prepare([text], tmp_path / "out", progress=again)


def test_a_folder_of_somebody_else_in_the_way_is_left_alone(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("x")
    with pytest.raises(InputError, match=r"found mine and no work\.json; move it away"):
        prepare([text], tmp_path / "out", PrepareOptions(force=True))
    assert (tmp_path / "out.partial" / "mine").read_text() == "x"


def test_text_that_changes_between_the_readings_is_told(text: Path, tmp_path: Path) -> None:
    def change(phase: str, done: int, total: int) -> None:
        if phase == "reading" and done == total:
            (text / "07.txt").write_text("other")

    with pytest.raises(HpctrainError, match=r"00\.txt \(or one of the 39 behind it\): changed while it was read"):
        prepare([text], tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()


def test_units_change_neither_the_documents_nor_the_splits(text: Path, tmp_path: Path) -> None:
    found = []
    for number, size in enumerate((None, 3000)):
        index = prepare([text], tmp_path / f"{number}", PrepareOptions(valid_fraction=0.2, unit_bytes=size, workers=1))
        found.append([documents(tokens(tmp_path / f"{number}", index, split), 256) for split in ("train", "valid")])
    assert found[0] == found[1]
    assert sum(shard.split == "valid" for shard in index.shards) == 1


@pytest.mark.parametrize("limit", [1, 3000, 17_000, 10**6])
def test_a_limit_is_kept_over_units(text: Path, tmp_path: Path, limit: int) -> None:
    options = PrepareOptions(limit_bytes=limit, unit_bytes=3000, valid_fraction=0.2, workers=1)
    index = prepare([text], tmp_path / "out", options)
    whole = sum(path.stat().st_size for path in text.iterdir())
    largest = max(path.stat().st_size for path in text.iterdir())
    assert min(limit, whole) - largest < index.sources.text_bytes <= max(limit, largest)
    assert index.tokens("train") + index.tokens("valid") >= index.sources.text_bytes


def test_progress_reaches_its_end(text: Path, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    prepare([text], tmp_path / "out", progress=lambda phase, done, total: seen.update({phase: (done, total)}))
    size = sum(path.stat().st_size for path in text.iterdir())
    assert seen == {"reading": (size, size), "encoding": (size, size)}


def test_the_index_is_one_that_people_and_scripts_can_read(text: Path, tmp_path: Path) -> None:
    prepare([text], tmp_path / "out")
    value = json.loads((tmp_path / "out" / "index.json").read_text())
    assert value["schema"] == "hpctrain.corpus/v1"
    assert value["shards"][0]["file"] == "train-00000.bin"
    assert str(tmp_path) not in json.dumps(value)
