"""Which files are read, and as what."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path

import pytest

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.inputs import InputFile, expand, find_inputs, format_of

SAVED = Path(__file__).parents[2] / "golden" / "datasets" / "saved"


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def names_in(folder: Path, *args: str) -> list[str]:
    return [str(file.path.relative_to(folder)) for file in find_inputs([folder], *args).files]


def test_a_folder_gives_its_text_files_sorted_and_nothing_hidden(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "a.md", "sub/c.py", "sub/d.rst.gz", "e.tex", "x.png", "f.json", ".git/g.txt", ".h.txt")
    make(tmp_path, "i.gz", "j.txt.zst")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names_in(tmp_path) == ["a.md", "b.txt", "e.tex", "j.txt.zst", "sub/c.py", "sub/d.rst.gz"]


def test_a_named_file_is_taken_whatever_its_name_and_each_only_once(tmp_path: Path) -> None:
    make(tmp_path, "a.log", "b.txt")
    found = find_inputs([tmp_path / "b.txt", tmp_path / "a.log", tmp_path])
    assert [file.path.name for file in found.files] == ["a.log", "b.txt"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.json.gz", "jsonl"),
        ("a.JSONL.zst", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.parquet", "parquet"),
        ("data-00000-of-00002.arrow", "arrow"),
        ("a.gz", "text"),
        ("README", "text"),
    ],
)
def test_the_name_says_the_format(name: str, expected: str) -> None:
    assert format_of(Path(name)) == expected


def test_a_folder_as_the_hub_has_it_gives_its_training_split(tmp_path: Path) -> None:
    make(tmp_path, "README.md", "dataset_infos.json", "data/train-00000-of-00002.parquet", "data/notes.txt")
    make(tmp_path, "data/train-00001-of-00002.parquet", "data/validation-00000-of-00001.parquet", "test/a.parquet")
    found = find_inputs([tmp_path])
    assert [file.path.name for file in found.files] == [f"train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert [path.name for path in found.other_splits] == ["validation-00000-of-00001.parquet", "a.parquet"]
    assert [path.name for path in found.beside_records] == ["README.md", "notes.txt"]
    both = find_inputs([tmp_path, tmp_path / "data" / "notes.txt"])
    assert both.files[0] == InputFile(tmp_path / "data" / "notes.txt", "text")
    assert [path.name for path in both.beside_records] == ["README.md"]


def test_a_folder_as_c4_has_it(tmp_path: Path) -> None:
    make(tmp_path, *(f"en/c4-{split}.0000{n}-of-01024.json.gz" for split in ("train", "validation") for n in (0, 1)))
    found = find_inputs([tmp_path])
    assert [file.path.name[:8] for file in found.files] == ["c4-train", "c4-train"]
    assert {file.format for file in found.files} == {"jsonl"}


def test_records_without_splits_are_all_taken(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "latest.jsonl.gz", "test-of-something.jsonl")
    assert len(find_inputs([tmp_path]).files) == 3


def test_a_format_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.txt", "c.parquet")
    assert names_in(tmp_path, "text") == ["b.txt"]
    assert names_in(tmp_path, "parquet") == ["c.parquet"]
    assert find_inputs([tmp_path / "b.txt"], "jsonl").files[0].format == "jsonl"


def test_a_saved_dataset_gives_the_files_that_its_state_names() -> None:
    assert names_in(SAVED) == ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    assert names_in(SAVED / "validation") == ["data-00000-of-00001.arrow"]


def test_a_saved_dataset_without_a_training_split_or_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(InputError, match="found the splits a, b and none called train; name the folder of one"):
        find_inputs([tmp_path])
    make(tmp_path, "c/x")
    (tmp_path / "c" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    with pytest.raises(InputError, match=r"data-0\.arrow is missing, which its state\.json names"):
        find_inputs([tmp_path / "c"])


def test_an_input_that_is_not_there_or_cannot_be_read_twice_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"IN: .*nothing: no such file or folder"):
        find_inputs([tmp_path / "nothing"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="found a pipe or device"):
        find_inputs([tmp_path / "pipe"])


def test_a_library_that_is_missing_is_told_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, library in (("a.parquet", "pyarrow"), ("b.txt.zst", "zstandard")):
        make(tmp_path, name)
        with pytest.raises(InputError, match=rf"needs {library}, .*run `pip install '{library}>=[\d.]+'`"):
            find_inputs([tmp_path / name])


def test_patterns_start_at_the_recipes_folder(tmp_path: Path) -> None:
    make(tmp_path, "a/1.txt", "a/b/2.txt", "c.txt")
    assert expand(["a/*.txt", "c.txt"], tmp_path) == [tmp_path / "a/1.txt", tmp_path / "c.txt"]
    assert expand([f"{tmp_path}/**/2.*"], Path("/nowhere")) == [tmp_path / "a/b/2.txt"]
    with pytest.raises(InputError, match=r"\*\.gz: found no such file below"):
        expand(["*.gz"], tmp_path)


def test_a_packed_text_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"x"))
    assert find_inputs([tmp_path]).files[0].format == "text"
