"""Captured output of real clients, and the fake Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from hpctrain.slurm.commands import Slurm

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
VERSIONS = ("22.05.8", "24.11.5")


class Captured:
    """The files of one version of Slurm."""

    def __init__(self, version: str) -> None:
        self.version = version

    def text(self, name: str) -> str:
        return (GOLDEN / self.version / name).read_text()

    def sections(self, name: str) -> dict[str, str]:
        """Section -> its text; the first line of a section is `== name`, with an exit code in replies.txt."""
        found: dict[str, list[str]] = {}
        for line in self.text(name).split("\n"):
            if line.startswith("== "):
                found[line.removeprefix("== ")] = []
            elif found:
                found[list(found)[-1]].append(line)
        return {section: "\n".join(lines).strip("\n") for section, lines in found.items()}


@pytest.fixture(params=VERSIONS)
def captured(request: pytest.FixtureRequest) -> Captured:
    return Captured(request.param)


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def slurm(fake: FakeSlurm) -> Slurm:
    return Slurm(fake, {"PATH": "/usr/bin"})
