"""Text found on the machine: the same each time, of about the size asked for."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from hpctrain.corpus.input.sample_text import TextLocation, default_text_locations, find_sample_text
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare

EVERYTHING = re.compile(".*")


def place(folder: Path, title: str, count: int, size: int = 1000, suffix: str = ".txt") -> TextLocation:
    (folder / title).mkdir(parents=True)
    for number in range(count):
        (folder / title / f"{number:03}{suffix}").write_text("x" * (size - 1) + "\n")
    return TextLocation(title, folder / title, EVERYTHING)


def test_each_place_gives_a_share_and_the_later_ones_fill_up(tmp_path: Path) -> None:
    places = [
        place(tmp_path, "few", 2),
        place(tmp_path, "many", 50),
        TextLocation("none", tmp_path / "none", EVERYTHING),
    ]
    text = find_sample_text(30_000, places)
    assert text.text_bytes == 30_000
    assert len(text.files) == 30
    assert text.description == "30 kB of text found on this machine: 2 few, 28 many"
    assert text == find_sample_text(30_000, places)


def test_a_machine_without_text_gives_nothing(tmp_path: Path) -> None:
    text = find_sample_text(1000, [TextLocation("none", tmp_path / "none", EVERYTHING)])
    assert (text.files, text.text_bytes) == ((), 0)
    assert text.description.endswith("none")


def test_packed_files_count_unpacked_and_links_and_crumbs_are_left_out(tmp_path: Path) -> None:
    where = place(tmp_path, "docs", 1)
    (where.folder / "packed.gz").write_bytes(gzip.compress(b"text " * 1000))
    (where.folder / "link.txt").symlink_to(where.folder / "000.txt")
    (where.folder / "crumb.txt").write_text("x")
    (where.folder / "no-archive.gz").write_bytes(b"x")
    text = find_sample_text(100_000, [where])
    assert [path.name for path in text.files] == ["000.txt", "packed.gz"]
    assert text.text_bytes == 6000


def test_python_alone_has_enough_for_a_first_run(tmp_path: Path) -> None:
    """As on a minimal machine: no manual pages, no documents."""
    python = [where for where in default_text_locations() if "Python" in where.title]
    text = find_sample_text(12_000_000, python)
    assert text.text_bytes >= 10_000_000
    index = prepare(text.files, tmp_path / "out", PrepareOptions(limit_bytes=1_000_000))
    assert 900_000 < index.sources.text_bytes <= 1_000_000
