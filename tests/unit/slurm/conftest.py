"""Captured output of real clients, and the fake Slurm."""

from __future__ import annotations

import pytest
from captured_slurm import GOLDEN, sections
from fake_slurm import FakeSlurm

from hpctrain.slurm.commands import Slurm

VERSIONS = ("22.05.8", "24.11.5")


class Captured:
    """The files of one version of Slurm."""

    def __init__(self, version: str) -> None:
        self.version = version

    def text(self, name: str) -> str:
        return (GOLDEN / self.version / name).read_text()

    def sections(self, name: str) -> dict[str, str]:
        """Section -> its text."""
        return sections(self.text(name))


@pytest.fixture(params=VERSIONS)
def captured(request: pytest.FixtureRequest) -> Captured:
    return Captured(request.param)


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def slurm(fake: FakeSlurm) -> Slurm:
    return Slurm(fake, {"PATH": "/usr/bin"})
