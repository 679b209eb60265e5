"""A prepared corpus and an undisturbed run: made once, looked at by many tests."""

from __future__ import annotations

import pytest
import yaml
from real_text import prepare_text
from train_site import RUN, Outcome, Site, four_node_plan, small_topology


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A prepared corpus, byte level, run files and topologies."""
    path = tmp_path_factory.mktemp("site")
    site = Site(path)
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    small_topology(4).write(path / "four.json")
    small_topology(1).write(path / "one.json")
    four_node_plan().write(path / "plan4.json")
    return site


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Outcome:
    """The run on one node, from start to end: what every other run must reproduce."""
    return site.train("run.yaml", "--local", "1", "--topology", "one.json")
