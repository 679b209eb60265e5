"""The command line in this process: exit code, stdout and stderr of one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from hpctrain.cli.main import main


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str


Call = Callable[..., Called]


@pytest.fixture(autouse=True)
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tests run, there may be a Slurm, and settings of a person for it."""
    fake = FakeSlurm()
    fake.installed = False
    monkeypatch.setattr("hpctrain.cli.commands.run_file.SystemRunner", lambda: fake)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS"):
        monkeypatch.delenv(name, raising=False)


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
