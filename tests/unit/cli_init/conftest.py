"""The command line in this process: exit code, stdout and stderr of one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.cli.main import main


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str


Call = Callable[..., Called]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """Runs `hpctrain ARGS...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["hpctrain", *map(str, args)])
        capsys.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Called(code if isinstance(code, int) else 0, out, err)

    return run
