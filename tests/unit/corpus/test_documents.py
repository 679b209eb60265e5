"""What of a file is text, in passages, for every format; and records that cannot be used."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.documents import ReadOptions, read_file_range, row_groups
from hpctrain.corpus.input.inputs import FileRange, Format, InputFile, plan_work_units
from hpctrain.corpus.input.passages import NotTextError, Passage, cut_record, passage_bytes
from hpctrain.corpus.input.skipped import BadRecords

ONE_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)
TEXTS = st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), max_size=400)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
SAVED = Path(__file__).parents[2] / "golden" / "datasets" / "saved"


def read(path: Path, format_: Format, size: int = 1000, skip: bool = False) -> tuple[list[str], int]:
    bad = BadRecords(skip)
    piece = FileRange(path, format_, path.stat().st_size)
    return [passage.text for passage in read_file_range(piece, ReadOptions(size), bad)], bad.count


@ONE_FOLDER
@given(text=TEXTS, size=st.integers(4, 60), packing=st.sampled_from(list(PACK)))
def test_the_passages_of_a_text_are_the_text(tmp_path: Path, text: str, size: int, packing: str) -> None:
    path = tmp_path / f"t{packing}"
    path.write_bytes(PACK[packing](text.encode()))
    found = list(read_file_range(FileRange(path, "text", 1), ReadOptions(size), BadRecords(False)))
    assert "".join(passage.text for passage in found) == text
    assert all(0 < len(passage.text.encode()) == passage.size_bytes <= size for passage in found)
    assert [passage.ends for passage in found] == [False] * (len(found) - 1) + [True] * bool(found)


@given(text=TEXTS, size=st.integers(4, 60))
def test_the_passages_of_a_record_are_the_record(text: str, size: int) -> None:
    found = list(cut_record(text, size))
    assert "".join(passage.text for passage in found) == text
    assert all(0 < len(passage.text.encode()) == passage.size_bytes <= size for passage in found)
    assert [passage.ends for passage in found] == [False] * (len(found) - 1) + [True] * bool(found)


def test_a_long_document_is_cut_at_line_ends_else_at_blanks(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("one\ntwo\nthree\nfour\n")
    assert read(tmp_path / "t", "text", 10)[0] == ["one\ntwo\n", "three\n", "four\n"]
    assert [passage.text for passage in cut_record("one two three", 9)] == ["one two ", "three"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "t", "text")[0] == ["hello"]


@pytest.mark.parametrize("data", [b"caf\xe9 au lait", b"text\0text", b"good\n" * 40 + b"\xff", b"\xe2\x82"])
def test_what_is_binary_is_not_text_wherever_it_shows(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(NotTextError):
        read(tmp_path / "t", "text", 16)


@ONE_FOLDER
@given(
    texts=st.lists(TEXTS, max_size=12),
    size=st.integers(1, 300),
    format_=st.sampled_from(["jsonl", "parquet"]),
)
def test_units_share_out_every_document_once(tmp_path: Path, texts: list[str], size: int, format_: Format) -> None:
    path = tmp_path / f"t.{format_}"
    if format_ == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=2)
    units = plan_work_units([(InputFile(path, format_), path.stat().st_size)], size, row_groups)
    reading = ReadOptions(10**6)
    found = [p.text for unit in units for piece in unit for p in read_file_range(piece, reading, BadRecords(False))]
    assert found == [text for text in texts if text]
    assert sum(piece.size_bytes for unit in units for piece in unit) <= path.stat().st_size


def test_a_text_is_shared_out_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("".join(f"line {number}\n" for number in range(300)) + "no end")
    units = plan_work_units([(InputFile(path, "text"), path.stat().st_size)], 200, row_groups)
    parts = ["".join(p.text for p in read_file_range(piece, ReadOptions(64), BadRecords(False))) for (piece,) in units]
    assert len(parts) > 10
    assert "".join(parts) == path.read_text()
    assert all(part.endswith("\n") for part in parts[:-1])


def test_small_files_go_together_and_archives_stay_whole(tmp_path: Path) -> None:
    sizes = [("a.txt", 10), ("b.txt", 10), ("c.txt.gz", 500), ("d.txt", 30), ("e.txt", 5)]
    units = plan_work_units([(InputFile(tmp_path / name, "text"), size) for name, size in sizes], 30, row_groups)
    assert [[piece.path.name for piece in unit] for unit in units] == [
        ["a.txt", "b.txt"],
        ["c.txt.gz"],
        ["d.txt"],
        ["e.txt"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", r"t\.jsonl:2: not valid JSON: .*; mend it, or leave such records out with --skip-bad"),
        ("[1]", r"t\.jsonl:2: found list, expected a JSON object a line"),
        ('{"title": 1, "body": 2}', r"found no text in the field 'text' \(its fields: title, body\); name one with"),
        ('{"text": null}', "found no text in the field 'text'"),
        ('{"text": "\\ud800"}', "document 2: holds half a surrogate pair"),
        (b"\xff".decode("latin-1"), "not valid JSON"),
    ],
)
def test_a_bad_line_is_told_with_its_number_or_counted(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line.encode("latin-1") + b'\n\n{"text": "two"}')
    with pytest.raises(InputError, match=message):
        read(path, "jsonl")
    assert read(path, "jsonl", skip=True) == (["one", "two"], 1)


def test_numbers_beside_the_text_may_be_whatever_python_writes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        '{"text": "one", "score": NaN}',
        '{"text": "two", "id": ' + "9" * 5000 + "}",
        '{"text": "three", "x": 1e999}',
    ]
    path.write_text("\n".join(lines))
    assert read(path, "jsonl") == (["one", "two", "three"], 0)


def test_a_bad_line_in_a_later_unit_has_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "x"}\n' * 100 + "bad\n")
    last = plan_work_units([(InputFile(path, "jsonl"), path.stat().st_size)], 200, row_groups)[-1][0]
    assert last.start > 0
    with pytest.raises(InputError, match=r"t\.jsonl:101: not valid JSON"):
        list(read_file_range(last, ReadOptions(100), BadRecords(False)))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_cut_off_archive_is_never_taken_for_a_short_one(tmp_path: Path, packing: str) -> None:
    lines = "".join(json.dumps({"text": f"document {n * n}"}) + "\n" for n in range(2000)).encode()
    path = tmp_path / f"t.jsonl{packing}"
    path.write_bytes(PACK[packing](lines)[:-200])
    with pytest.raises(InputError, match=r"t\.jsonl.*damaged archive: .*--skip-bad"):
        read(path, "jsonl")
    found, bad = read(path, "jsonl", skip=True)
    assert bad == 1
    assert len(found) < 2000
    path.write_bytes(b"no archive at all")
    with pytest.raises(InputError, match="damaged archive"):
        read(path, "jsonl")


def test_several_frames_are_one_file(tmp_path: Path) -> None:
    for packing in (".gz", ".zst"):
        path = tmp_path / f"t{packing}"
        path.write_bytes(PACK[packing](b"one ") + PACK[packing](b"two"))
        assert read(path, "text")[0] == ["one two"]


def test_columns_without_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"title": ["a"], "n": [1]}), path)
    with pytest.raises(InputError, match=r"found no column 'text'; its columns: title, n; name one with --text-field"):
        read(path, "parquet", skip=True)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(InputError, match="the column 'text' holds int64, expected text"):
        read(path, "parquet", skip=True)
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(InputError, match=r"t\.parquet: row 2: found no text"):
        read(path, "parquet")
    assert read(path, "parquet", skip=True) == (["a", "b"], 1)
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match="damaged, or no Parquet file"):
        read(path, "parquet")


def test_what_datasets_saved_and_feather_files_are_read(tmp_path: Path) -> None:
    assert read(SAVED / "train" / "data-00000-of-00002.arrow", "arrow")[0] == ["First document.", "Second one, naïve."]
    table = pa.table({"text": ["a", "b"]})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "t.arrow", "arrow")[0] == ["a", "b"]
    (tmp_path / "t.arrow").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="damaged, or no Arrow file"):
        read(tmp_path / "t.arrow", "arrow")


def test_passages_are_a_quarter_of_the_validation_part_within_bounds() -> None:
    assert [passage_bytes(4_000_000, fraction) for fraction in (0.01, 0.0, 0.9)] == [10_000, 2048, 256 * 1024]


def test_a_passage_knows_its_size() -> None:
    assert list(cut_record("é", 10)) == [Passage("é", 2, True)]
