"""The command line on a fake Slurm."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_slurm import FakeSlurm

from hpctrain.cli.main import cli

USES_SLURM = (
    "cli.commands.manage", "cli.commands.resubmit", "cli.commands.submit", "cli.commands.sweep", "jobs.run_status",
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A Slurm that every command talks to; run folders lie on a file system that all nodes share."""
    fake = FakeSlurm()
    for name in USES_SLURM:
        monkeypatch.setattr(importlib.import_module(f"hpctrain.{name}"), "SystemRunner", lambda: fake, raising=False)
    monkeypatch.setattr("hpctrain.runs.file_system.file_system_of", lambda path: "nfs4")
    return fake


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders go, seen from the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("HPCTRAIN_RUNS", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "runs"


@pytest.fixture
def hpctrain() -> Callable[..., Result]:
    """Run a verb; an error of ours is in `exception`."""
    return lambda *words: CliRunner().invoke(cli, list(words))
