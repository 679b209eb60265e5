"""Which files are text, and what their passages are."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.corpus.sources import (
    NotTextError,
    list_files,
    passage_bytes,
    passages,
    read_passages,
    scan_files,
    validation_mask,
)

ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TEXTS = st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), max_size=400)


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_gives_its_text_files_sorted_and_nothing_hidden(tmp_path: Path) -> None:
    names = ["b.txt", "a.md", "sub/c.py", "sub/d.rst.gz", "e.tex", "x.png", "f.json", ".git/g.txt", ".h.txt", "i.gz"]
    make(tmp_path, dict.fromkeys(names, b"x"))
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in list_files([tmp_path])]
    assert found == ["a.md", "b.txt", "e.tex", "sub/c.py", "sub/d.rst.gz"]


def test_a_named_file_is_taken_whatever_its_name_and_each_only_once(tmp_path: Path) -> None:
    make(tmp_path, {"a.log": b"x", "b.txt": b"x"})
    paths = [tmp_path / "b.txt", tmp_path / "a.log", tmp_path]
    assert list_files(paths) == [tmp_path / "a.log", tmp_path / "b.txt"]


def test_an_input_that_is_not_there_or_cannot_be_read_twice_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"IN: .*nothing: no such file or folder"):
        list_files([tmp_path / "nothing"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="found a pipe or device"):
        list_files([tmp_path / "pipe"])


@ONE_FOLDER
@given(text=TEXTS, size=st.integers(4, 60), packed=st.booleans())
def test_the_passages_of_a_file_are_its_text(tmp_path: Path, text: str, size: int, packed: bool) -> None:
    path = tmp_path / ("t.gz" if packed else "t")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = list(passages(path, size))
    assert "".join(found) == text
    assert all(0 < len(piece.encode()) <= size for piece in found)


def test_a_long_document_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = make(tmp_path, {"t": b"one\ntwo\nthree\nfour\n"}) / "t"
    assert list(passages(path, 10)) == ["one\ntwo\n", "three\n", "four\n"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = make(tmp_path, {"t": b"\xef\xbb\xbfhello"}) / "t"
    assert list(passages(path, 100)) == ["hello"]


@pytest.mark.parametrize("data", [b"caf\xe9 au lait", b"text\0text", b"good\n" * 40 + b"\xff", b"\xe2\x82"])
def test_what_is_binary_is_not_text_wherever_it_shows(tmp_path: Path, data: bytes) -> None:
    path = make(tmp_path, {"t": data}) / "t"
    with pytest.raises(NotTextError):
        list(passages(path, 16))


def test_a_scan_counts_what_it_leaves_out_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    files = {
        "a.txt": b"line\n" * 10,
        "b.txt": b"good\n" * 40 + b"\xff",
        "c.txt.gz": gzip.compress(b"x" * 5000)[:-20],
        "d.txt.gz": b"no archive",
        "e.txt": b"",
    }
    scan = scan_files(list_files([make(tmp_path, files)]), 16)
    assert [path.name for path, _ in scan.files] == ["a.txt"]
    assert (scan.text_bytes, scan.skipped_not_text, scan.skipped_unreadable) == (50, 1, 2)
    assert sum(scan.sizes) == 50
    assert "".join(text for text, _ in read_passages(scan, 16)) == "line\n" * 10


@ONE_FOLDER
@given(limit=st.integers(1, 3000))
def test_a_limit_is_kept_to_within_a_passage(tmp_path: Path, limit: int) -> None:
    make(tmp_path, {f"{n}.txt": b"0123456789\n" * 50 for n in range(4)})
    scan = scan_files(list_files([tmp_path]), 64, limit)
    assert 0 < scan.text_bytes <= max(64, limit)
    assert scan.text_bytes > min(limit, 2200) - 64
    assert sum(len(text.encode()) for text, _ in read_passages(scan, 64)) == scan.text_bytes


def test_a_file_that_changes_between_the_readings_is_told(tmp_path: Path) -> None:
    make(tmp_path, {"a.txt": b"one\n"})
    scan = scan_files(list_files([tmp_path]), 64)
    make(tmp_path, {"a.txt": b"two\n"})
    with pytest.raises(HpctrainError, match=r"a\.txt: changed while it was read"):
        list(read_passages(scan, 64))


def test_the_validation_part_has_its_size_and_does_not_depend_on_the_order(tmp_path: Path) -> None:
    make(tmp_path, {f"{n:03}.txt": f"document {n}\n".encode() * 20 for n in range(200)})
    files = list_files([tmp_path])
    kept = []
    for order in (files, files[::-1]):
        scan = scan_files(order, 10_000)
        mask = validation_mask(scan, 0.1)
        kept.append({text for (text, _), valid in zip(read_passages(scan, 10_000), mask, strict=True) if valid})
        share = sum(size for size, valid in zip(scan.sizes, mask, strict=True) if valid) / scan.text_bytes
        assert 0.08 < share <= 0.1
    assert kept[0] == kept[1]


def test_equal_documents_go_the_same_way(tmp_path: Path) -> None:
    make(tmp_path, {f"{n:03}.txt": f"document {n % 5}\n".encode() for n in range(100)})
    scan = scan_files(list_files([tmp_path]), 1000)
    mask = validation_mask(scan, 0.3)
    ways = {(hash_, bool(valid)) for hash_, valid in zip(scan.hashes, mask, strict=True)}
    assert len(ways) == 5
    assert {valid for _, valid in ways} == {True, False}


@pytest.mark.parametrize(
    ("texts", "fraction", "expected"),
    [
        (["a"], 0.5, 0),
        (["a", "b"], 0.0, 0),
        (["a", "a"], 0.5, 0),
        (["a", "b"], 0.001, 1),
        ([f"t{n}" for n in range(9)], 0.99, 8),
    ],
)
def test_the_ends_of_splitting(tmp_path: Path, texts: list[str], fraction: float, expected: int) -> None:
    make(tmp_path, {f"{n}.txt": text.encode() for n, text in enumerate(texts)})
    scan = scan_files(list_files([tmp_path]), 1000)
    assert int(validation_mask(scan, fraction).sum()) == expected


def test_passages_are_a_quarter_of_the_validation_part_within_bounds(tmp_path: Path) -> None:
    path = make(tmp_path, {"a.txt": b"x" * 4_000_000}) / "a.txt"
    assert passage_bytes([path], 0.01) == 10_000
    assert passage_bytes([path], 0.0) == 2048
    assert passage_bytes([path], 0.9) == 256 * 1024
