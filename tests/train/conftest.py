"""A prepared corpus and an undisturbed run: made once, looked at by many tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from train_site import RUN, Outcome, Site, four_node_plan, small_topology


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A prepared corpus of this repository's own text, byte level."""
    path = tmp_path_factory.mktemp("site")
    site = Site(path)
    root = Path(__file__).resolve().parents[2]
    done = site.command("data", "prepare", str(root / "hpctrain"), "-o", "data", "--tokenizer", "bytes")
    assert done.returncode == 0, done.stderr
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    small_topology(4).write(path / "four.json")
    small_topology(1).write(path / "one.json")
    four_node_plan().write(path / "plan4.json")
    return site


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Outcome:
    """The run on one node, from start to end: what every other run must reproduce."""
    return site.train("run.yaml", "--local", "1", "-t", "one.json")
