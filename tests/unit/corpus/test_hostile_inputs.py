"""Text that somebody else made: bombs, FIFOs, names that lead elsewhere, damaged files and tokenizers that panic."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hostile_files import check_reader, damaged, hostile_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import FileError, InputError
from hpctrain.corpus.input import compressed_input
from hpctrain.corpus.input.compressed_input import open_decompressed
from hpctrain.corpus.input.documents import ReadOptions, read_file_range
from hpctrain.corpus.input.inputs import FileRange, find_inputs
from hpctrain.corpus.input.passages import NotTextError
from hpctrain.corpus.input.skipped import BadRecords
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.prepare.shards import check_corpus
from hpctrain.corpus.prepare.tokenizer import load_tokenizer
from hpctrain.corpus.read.node_cache import cache_on_node
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.corpus.read.tokens import Corpus
from hpctrain.records.run.objective import Masked

pytestmark = pytest.mark.slow

MANY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
MIB = 2**20
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 9), ".zst": lambda data: zstandard.compress(data)
}  # fmt: skip


def bomb(packing: str, mib: int) -> bytes:
    """An archive of one piece that becomes so many MiB of one letter: of 96 KB, 3 GB."""
    stream = io.BytesIO()
    if packing == ".zst":
        with zstandard.ZstdCompressor(write_content_size=False).stream_writer(stream, closefd=False) as writer:
            for _ in range(mib):
                writer.write(b"a" * MIB)
    else:
        with gzip.GzipFile(fileobj=stream, mode="wb") as file:
            for _ in range(mib):
                file.write(b"a" * MIB)
    return stream.getvalue()


def count_bytes(path: Path, counts: list[int]) -> None:
    with open_decompressed(path) as file:
        while data := file.read(MIB):
            counts.append(len(data))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_bomb_is_unpacked_up_to_a_bound_and_no_further(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{packing}"
    path.write_bytes(bomb(packing, 256))
    counts: list[int] = []
    with pytest.raises(OSError, match="unpacks to more than 200 times its size"):
        count_bytes(path, counts)
    count = sum(counts)
    assert count <= compressed_input.ALWAYS_ALLOWED_BYTES + compressed_input.MAX_EXPANSION * path.stat().st_size
    assert count < 130 * MIB


def test_the_library_is_given_so_little_at_once_that_it_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched:
        def __init__(self, frame: Any) -> None:
            self._frame = frame

        def decompress(self, data: bytes) -> bytes:
            out: bytes = self._frame.decompress(data)
            outputs.append(len(out))
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(self._frame, name)

    class Decompressor:
        def decompressobj(self) -> Watched:
            return Watched(real().decompressobj())

    real, outputs = zstandard.ZstdDecompressor, list[int]()
    path = tmp_path / "t.zst"
    path.write_bytes(bomb(".zst", 256))
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Decompressor)
    with pytest.raises(OSError, match="unpacks to more"):
        count_bytes(path, [])
    assert 0 < max(outputs) <= 64 * MIB


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_text_that_packs_well_is_read_whole_beyond_what_is_free(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_input, "ALWAYS_ALLOWED_BYTES", 100_000)
    text = "".join(f"line {n}: the same words stand in every line of this log\n" for n in range(20_000)).encode()
    (tmp_path / f"t{packing}").write_bytes(PACK[packing](text))
    with open_decompressed(tmp_path / f"t{packing}") as file:
        assert file.read() == text


def test_a_bomb_beside_texts_is_left_out_and_one_of_records_ends_the_command(tmp_path: Path) -> None:
    texts, records = tmp_path / "texts", tmp_path / "records"
    texts.mkdir()
    records.mkdir()
    (texts / "a.txt").write_text("some text\n" * 50)
    (texts / "b.txt.zst").write_bytes(bomb(".zst", 80))
    index = prepare([texts], tmp_path / "out", PrepareOptions(valid_fraction=0.0))
    assert (index.sources.files, index.sources.skipped_unreadable) == (1, 1)
    (records / "b.jsonl.zst").write_bytes(bomb(".zst", 80))
    with pytest.raises(InputError, match=r"b\.jsonl\.zst:1: .*(unpacks to more|longer than)"):
        prepare([records], tmp_path / "out2", PrepareOptions(valid_fraction=0.0))


def test_a_fifo_in_a_folder_is_waited_for_by_nobody(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text\n" * 50)
    for name in ("b.txt", "c.txt.gz", "dataset_dict.json", "state.json"):
        os.mkfifo(texts / name)
    (texts / "d.txt").symlink_to("/dev/zero")
    index = prepare([texts], tmp_path / "out", PrepareOptions(valid_fraction=0.0))
    assert (index.sources.files, index.sources.skipped_unreadable) == (1, 3)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.parquet", "t.arrow"])
def test_a_fifo_of_records_ends_the_command_with_its_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    os.mkfifo(folder / name)
    form = "arrow" if name.endswith(".arrow") else "auto"
    with pytest.raises(InputError, match=rf"{name}.*is a FIFO, expected a regular file"):
        prepare([folder], tmp_path / "out", PrepareOptions(valid_fraction=0.0, format=form))


def make_corpus(base: Path) -> Path:
    (base / "a.txt").write_text("some text\n" * 400)
    prepare([base / "a.txt"], base / "data", PrepareOptions(valid_fraction=0.1))
    return base / "data"


def never() -> None:
    """Whoever copies is never asked to give up."""


@pytest.mark.parametrize("name", ["../../../.bash_profile", "/tmp/x", "..", "index.json", ".x", "a/b", "a\0b"])
def test_an_index_plants_no_file_wherever_it_is_used(name: str, tmp_path: Path) -> None:
    folder = make_corpus(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["file"] = name
    (folder / "index.json").write_text(json.dumps(index))
    node = tmp_path / "home" / "user" / "node"
    node.mkdir(parents=True)
    users: list[Callable[[], object]] = [
        lambda: cache_on_node(folder, node, SystemClock(), never),
        lambda: check_corpus(folder, lambda count: None),
        lambda: Corpus.open([folder], "train", 8),
    ]
    for use in users:
        with pytest.raises(FileError, match=r"index\.json: shards"):
            use()
    assert list(node.rglob("*")) == []
    assert not list(tmp_path.rglob(".bash_profile"))


def test_two_shards_of_one_file_are_refused(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["shards"].append(index["shards"][0])
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"shards: .*'train-00000\.bin' is named twice"):
        Corpus.open([folder], "train", 8)


def test_a_fifo_in_the_place_of_a_shard_or_tokenizer_hangs_nobody(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["tokenizer"] |= {"file": "tokenizer.json", "sha256": "0" * 64}
    (folder / "index.json").write_text(json.dumps(index))
    os.mkfifo(folder / "tokenizer.json")
    (folder / "train-00000.bin").unlink()
    os.mkfifo(folder / "train-00000.bin")
    with pytest.raises(FileError, match=r"tokenizer\.json is a FIFO"):
        check_corpus(folder, lambda count: None)
    with pytest.raises(FileError, match=r"train-00000\.bin: is a FIFO"):
        cache_on_node(folder, tmp_path, SystemClock(), never)
    with pytest.raises(FileError, match=r"tokenizer\.json: .*is a FIFO"):
        special_tokens([folder], Masked(mode="masked"), 16)


@pytest.mark.parametrize("name", ["../data.arrow", "/etc/passwd", "", ".x", 3, None, "x" * 300])
def test_a_saved_dataset_names_only_what_lies_in_it(name: object, tmp_path: Path) -> None:
    (tmp_path / "data.arrow").write_bytes(b"")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(FileError, match=r"state\.json: _data_files: found .*save the dataset again"):
        find_inputs([folder])
    if isinstance(name, str):
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        with pytest.raises(FileError, match=r"dataset_dict\.json: splits: found .*save the dataset again"):
            find_inputs([folder])


@MANY
@given(
    hostile_json({"splits": ["train", "test"]}),
    hostile_json({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}),
)
def test_any_saved_dataset_is_read_or_refused(tmp_path: Path, splits: bytes, state: bytes) -> None:
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "dataset_dict.json").write_bytes(splits)
    (tmp_path / "train" / "state.json").write_bytes(state)
    check_reader(lambda path: find_inputs([path.parent]), tmp_path / "dataset_dict.json")


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"text": ["one document", "two", "naïve"] * 5, "n": list(range(15))}), sink, row_group_size=4
    )
    return sink.getvalue()


def arrow() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ["one document", "two", "naïve"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


LINES = b'{"text": "one document"}\n{"text": "two", "id": 1}\n'
INPUTS: dict[str, bytes] = {
    "t.txt": "some text\nnaïve\n".encode(), "t.jsonl": LINES, "t.txt.gz": gzip.compress(b"some text\n" * 9),
    "t.jsonl.gz": gzip.compress(LINES), "t.jsonl.zst": zstandard.compress(LINES * 3), "t.parquet": parquet(),
    "t.arrow": arrow(),
}  # fmt: skip


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_any_input_gives_passages_or_is_refused(name: str, skip: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    (file,) = find_inputs([_written(path, INPUTS[name])]).files

    def read(path: Path) -> object:
        piece = FileRange(path, file.format, path.stat().st_size)
        # What the scan of a unit turns into a line or a count.
        with contextlib.suppress(NotTextError, OSError):
            return sum(
                len(passage.text) for passage in read_file_range(piece, ReadOptions(64, "text", skip), BadRecords(skip))
            )
        return None

    assert read(path)

    @settings(MANY, max_examples=80)
    @given(damaged(INPUTS[name]) | st.binary(max_size=40))
    def fuzz(data: bytes) -> None:
        check_reader(read, _written(path, data))

    fuzz()


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@MANY
@given(hostile_json({"text": "one document", "meta": {"a": [1]}}, {"text": "x", "id": 3}))
def test_any_line_of_records_gives_passages_or_is_refused(tmp_path: Path, data: bytes) -> None:
    path = _written(tmp_path / "t.jsonl", data)
    piece = FileRange(path, "jsonl", len(data))
    check_reader(lambda path: list(read_file_range(piece, ReadOptions(64), BadRecords(False))), path)


TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "added_tokens": [{"id": 3, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "unk_token": None},
}  # fmt: skip
PANICS: dict[str, dict[str, Any]] = {
    "when read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a merge that is no token": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"],
                                           "continuing_subword_prefix": "#########"}},
    "when used": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}  # fmt: skip


@pytest.mark.parametrize("case", PANICS)
def test_a_tokenizer_that_panics_is_one_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | PANICS[case]))
    (tmp_path / "a.txt").write_text("a b ab\n" * 50)
    with pytest.raises(InputError, match=r"^--tokenizer.*tokenizers library.*; give another file$"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", PrepareOptions(tokenizer=str(path), valid_fraction=0.0))


def test_a_token_with_an_id_beyond_any_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {**TOKENIZER["model"], "vocab": {"a": 0, "b": 1, "ab": 4_000_000_000}}
    path.write_text(json.dumps(TOKENIZER | {"model": model}))
    with pytest.raises(InputError, match="found a token with the id 4000000000, allowed: below 16777216"):
        load_tokenizer(str(path))


def test_any_tokenizer_is_loaded_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def read(path: Path) -> object:
        return load_tokenizer(str(path)).vocab_size

    path.write_text(json.dumps(TOKENIZER))
    assert read(path) == 4

    @MANY
    @given(hostile_json(TOKENIZER))
    def fuzz(data: bytes) -> None:
        check_reader(read, _written(path, data))

    fuzz()
