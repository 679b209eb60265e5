"""State in memory that outlives the processes: training on it and starting again from it change no bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from memory_cases import FEWER, HALFWAY, NO_ROOM, OTHER, SAME, SNAPSHOTS
from processes import run_cases

SCRIPT = Path(__file__).with_name("memory_cases.py")
KILLED = Path(__file__).with_name("killed_update_cases.py")


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(SCRIPT, "same", 2, tmp_path_factory.mktemp("same"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    four = run_cases(SCRIPT, "other", 4, tmp_path_factory.mktemp("other"))
    return four | run_cases(SCRIPT, "fewer", 8, tmp_path_factory.mktemp("fewer"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(KILLED, "all", 1, tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_two_generations_in_memory_are_one_without_it_bit_by_bit(name: str, same: dict[str, dict[str, Any]]) -> None:
    # Also the row that was lost half way, with its validation.
    assert same[name]["rows"]
    assert same[name]["unequal"] == []
    assert same[name]["compared"] > 20
    assert same[name]["dropped"] is None
    # No rank may update before all have kept what is needed to finish the step.
    assert same[name]["early"] == []
    assert same[name]["skipped"] is None or same[name]["skipped"] > 0


@pytest.mark.slow
def test_without_shared_memory_on_one_rank_all_ranks_train_in_their_own(same: dict[str, dict[str, Any]]) -> None:
    assert same[NO_ROOM]["kept"] == [[True, None], [True, None]]
    assert same[NO_ROOM]["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHER, *FEWER])
def test_another_plan_starts_from_memory_as_from_a_checkpoint(name: str, other: dict[str, dict[str, Any]]) -> None:
    assert other[name]["unequal"] == []
    assert other[name]["compared"] > 20
    assert other[name]["steps"] == [HALFWAY]
    # The generation that ended may have been killed before it had saved the step that is in memory.
    assert other[name]["saved by"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHER, *FEWER])
def test_memory_of_a_plan_that_cannot_be_read_is_not_used_again(name: str, other: dict[str, dict[str, Any]]) -> None:
    assert "plan-gone.json" in other[name]["refused"]
    assert other[name]["held"]
    assert not any(other[name]["held"])


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(SCRIPT, "snapshots", 2, tmp_path_factory.mktemp("snapshots"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_after_the_loss_of_a_node_the_snapshots_have_every_part(
    name: str, snapshots: dict[str, dict[str, Any]]
) -> None:
    found = snapshots[name]
    # The last snapshots are complete before the workers end.
    assert found["step"] == HALFWAY
    assert found["snapshots"] == [HALFWAY - 1, HALFWAY]
    assert found["unequal"] == []
    assert re.search(r"cannot be loaded: \S+: 5120 of 10240 numbers are there$", found["half"])
    assert found["damaged"] == "the snapshot of the state of rank 1 in memory is damaged"
    assert found["afterwards"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "not fused", "overflow"])
def test_an_update_that_was_killed_anywhere_is_finished_bit_by_bit(
    name: str, killed: dict[str, dict[str, Any]]
) -> None:
    found = killed[name]
    assert found["wrong"] == []
    # Before the gradients are complete the step is lost; afterwards it is finished, by the norm of another rank or its
    # own.
    assert found["old"] > 0
    assert found["finished"] > found["old"]
    assert found["torn"] == (0 if name == "overflow" else found["buckets"])
    assert found["finished twice"] > 0
