"""The list of what is not in a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.base.errors import FileError
from hpctrain.corpus.input.skipped import LISTED_BYTES, SKIPPED_NAME, SkippedInput, SkippedList, read_skipped


def test_there_is_no_list_where_nothing_was_skipped(tmp_path: Path) -> None:
    SkippedList().write(tmp_path)
    assert not list(tmp_path.iterdir())
    assert read_skipped(tmp_path, 3) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"skipped": 1}', '{"skipped": 1, "listed": 1}\n{"file": "a"}\n', "\xff"]
)
def test_a_damaged_list_is_an_error_of_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / SKIPPED_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=r"skipped\.jsonl: is damaged"):
        read_skipped(tmp_path, 3)


def test_entries_come_back_with_their_places(tmp_path: Path) -> None:
    entries = [
        SkippedInput("a.txt", "binary"),
        SkippedInput("b.jsonl", "no JSON", "line", 7),
        SkippedInput("c.parquet", "no text", "row", 9),
    ]
    skipped = SkippedList(entries)
    skipped.add([], more=5)
    skipped.write(tmp_path)
    assert read_skipped(tmp_path, 9) == (8, 3, entries)
    assert read_skipped(tmp_path, 1) == (8, 3, entries[:1])
    assert [str(entry) for entry in entries] == ["a.txt: binary", "b.jsonl:7: no JSON", "c.parquet: row 9: no text"]


def test_the_list_is_bounded_and_the_count_is_not(tmp_path: Path) -> None:
    skipped = SkippedList()
    skipped.add(SkippedInput("d" * 4000, "r" * 10_000, "line", n) for n in range(3000))
    skipped.write(tmp_path)
    assert (tmp_path / SKIPPED_NAME).stat().st_size < LISTED_BYTES * 1.01
    assert json.loads((tmp_path / SKIPPED_NAME).read_text().splitlines()[0])["skipped"] == 3000
    assert len(skipped.listed) < 1000


def test_a_name_that_is_no_text_is_listed(tmp_path: Path) -> None:
    SkippedList([SkippedInput("caf\udce9.txt", "binary")]).write(tmp_path)
    assert read_skipped(tmp_path, 1) == (1, 1, [SkippedInput("caf\udce9.txt", "binary")])
