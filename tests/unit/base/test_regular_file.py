"""Files that are opened only where they are regular, and read only up to a limit."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.base.regular_file import open_regular, read_and_close, read_regular


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    assert read_regular(tmp_path / "file", 3_000_000) == b"x" * 3_000_000


def test_a_file_above_the_limit_is_refused_with_both_figures(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(FileError, match="has 11 bytes or more, expected at most 10"):
        read_regular(tmp_path / "file", 10)


def test_a_huge_sparse_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("a byte was read"))
    with pytest.raises(FileError, match="expected at most 1000"):
        read_regular(tmp_path / "file", 1000)


def test_a_file_that_grows_meanwhile_is_read_up_to_the_limit(tmp_path: Path) -> None:
    # Files of /proc have no size, as one that grows after it was looked at.
    descriptor = open_regular("/proc/self/maps")
    copy = os.dup(descriptor)
    try:
        with pytest.raises(FileError, match="has 101 bytes or more, expected at most 100"):
            read_and_close(descriptor, "/proc/self/maps", 100)
        assert os.lseek(copy, 0, os.SEEK_CUR) == 101
    finally:
        os.close(copy)


def _make(kind: str, path: Path) -> None:
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a symbolic link":
            path.symlink_to(Path("/etc/passwd"))
        case "a folder":
            path.mkdir()
        case "a socket":
            socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a folder", "a socket"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    _make(kind, tmp_path / "file")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileError, match=f"file: is {kind}, expected a regular file"):
        open_regular(tmp_path / "file")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_device_is_refused() -> None:
    with pytest.raises(FileError, match="is a device"):
        read_regular("/dev/zero", 10)


def test_a_missing_file_is_the_system_s_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "file")


def test_a_path_starts_from_the_folder_that_was_opened(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("mine")
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / "file").write_text("theirs")
        assert read_regular("file", 100, dir_fd=opened) == b"mine"
    finally:
        os.close(opened)


@given(data=st.binary(max_size=64), limit=st.integers(0, 64))
def test_the_limit_decides_and_nothing_else(data: bytes, limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "limited"
    path.write_bytes(data)
    if len(data) <= limit:
        assert read_regular(path, limit) == data
    else:
        with pytest.raises(FileError):
            read_regular(path, limit)
