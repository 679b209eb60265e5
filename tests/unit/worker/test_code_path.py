"""Which copy of a person's code a worker imports."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

import pytest

from hpctrain.base.activity import shared_record
from hpctrain.worker import train


def test_the_copy_comes_before_the_folder_that_the_worker_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in ((tmp_path, "live"), (tmp_path / "code", "copy")):
        folder.mkdir(exist_ok=True)
        (folder / "my_model_of_today.py").write_text(f"NAME = {text!r}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as `python -m` does with the current folder
    found = []

    def work(orders: object, folder: Path) -> int:
        found.append(importlib.import_module("my_model_of_today").NAME)
        return 0

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(train, "_work", work)
    monkeypatch.setattr(os, "_exit", leave)
    ours, theirs = socket.socketpair()
    memory = os.fdopen(shared_record())
    with ours, memory, pytest.raises(SystemExit):
        train.main(["--folder", str(tmp_path), "--fd", str(theirs.detach()), "--activity", str(memory.fileno())])
    sys.modules.pop("my_model_of_today", None)
    assert found == ["copy"]
