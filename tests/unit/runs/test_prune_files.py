"""What `hpctrain prune` counts in a run folder while a process still removes files from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.runs.prune import last_activity, size_of


def test_a_file_that_disappears_while_it_is_counted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = tmp_path / "checkpoints", os.lstat
    folder.mkdir()
    (folder / "stays").write_bytes(b"abc")
    os.utime(folder / "stays", (7, 7))

    def late(path: str) -> os.stat_result:
        if path.endswith("/gone"):
            Path(path).unlink()
        return look(path)

    monkeypatch.setattr("os.lstat", late)
    (folder / "gone").write_bytes(b"abcde")
    assert size_of(tmp_path) == 3
    (folder / "gone").write_bytes(b"abcde")
    assert last_activity(tmp_path) == 7
