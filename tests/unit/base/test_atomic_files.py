"""Files are whole or not there, whatever happens to the writer."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hpctrain.base.atomic import append_line, write_bytes, write_json, write_text
from hpctrain.base.errors import StorageError

LIMIT_BYTES = 4096


SmallFiles = Callable[[int], AbstractContextManager[None]]


def test_a_written_file_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    write_text(path, "newer, ä")
    assert path.read_bytes() == "newer, ä".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_is_that_asked_for(tmp_path: Path) -> None:
    write_bytes(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_failing_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, small_files: SmallFiles) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with small_files(LIMIT_BYTES), pytest.raises(StorageError, match=f"{path}: cannot write"):
        write_text(path, "x" * (LIMIT_BYTES + 1))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/file: cannot write: .*; make the folder first"):
        write_text(tmp_path / "missing" / "file", "x")


def test_json_that_other_readers_would_refuse_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "file.json", {"x": float("nan")})
    assert not list(tmp_path.iterdir())


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": ')
    append_line(path, '{"a": 3}')
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": ', '{"a": 3}']


def test_a_line_cut_short_by_a_full_disk_is_an_error_and_is_ended_by_the_next(
    tmp_path: Path, small_files: SmallFiles
) -> None:
    path = tmp_path / "lines"
    append_line(path, "x" * (LIMIT_BYTES - 10))
    with small_files(LIMIT_BYTES), pytest.raises(StorageError, match="lines: cannot write"):
        append_line(path, "y" * 100)
    append_line(path, "z")
    assert path.read_text().splitlines()[2] == "z"


WRITER = """
import sys
from pathlib import Path
from hpctrain.base.atomic import write_text
path = Path(sys.argv[1])
while True:
    for letter in "ab":
        write_text(path, letter * 200_000)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        deadline = time.monotonic() + 120
        path.unlink(missing_ok=True)
        while not path.exists():
            assert time.monotonic() < deadline, "the writer wrote nothing"
            time.sleep(0.001)
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert path.read_text() in ("a" * 200_000, "b" * 200_000)
