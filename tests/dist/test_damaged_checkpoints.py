"""The ranks that load a checkpoint hash its files together, and none goes on from a damaged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("damage_cases.py")
WORLDS = (1, 3, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """World size -> what loading gave; the checkpoint is of four ranks. 0 -> what saving gave."""
    folder = tmp_path_factory.mktemp("damaged")
    saved = {0: run_cases(SCRIPT, "save", 4, folder)}
    return saved | {world: run_cases(SCRIPT, "load", world, folder) for world in WORLDS}


@pytest.mark.slow
def test_a_file_that_cannot_be_hashed_costs_the_checkpoint_and_no_rank(results: dict[int, dict[str, Any]]) -> None:
    lost = results[0]["lost"]
    assert lost["files"] == []
    (error,) = set(lost["errors"])
    assert error.endswith("/__2_0.distcp: rank 2 cannot read what it wrote: No such file or directory")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "most"), [(1, 4), (3, 2), (4, 1)])
def test_every_file_is_hashed_once_and_by_all_ranks_together(
    world: int, most: int, results: dict[int, dict[str, Any]]
) -> None:
    good = results[world]["good"]
    assert good["error"] == 0.0
    assert sorted(name for share in good["shares"] for name in share) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert max(len(share) for share in good["shares"]) == most
    assert good["again"] == good["shares"], "a second load hashes nothing again"


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_rank_goes_on_from_a_damaged_checkpoint(world: int, results: dict[int, dict[str, Any]]) -> None:
    damaged = results[world]["damaged"]
    assert damaged["flipped"] == ["step-00000002: __2_0.distcp is not what was written (its hash differs)"] * world
    assert len(set(damaged["truncated"])) == 1
    assert "step-00000002: __3_0.distcp has " in damaged["truncated"][0]
    assert damaged["linked"] == ["step-00000002: __0_0.distcp is a symbolic link, expected a regular file"] * world
    assert damaged["list"] == ["step-00000002: .metadata is not what was written (its hash differs)"] * world
