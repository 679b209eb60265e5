"""What codecs have not sent yet: each rank keeps it with the same layout of ranks, all together with another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from codec_state_cases import END, FEWER, MOVED
from processes import run_cases

SCRIPT = Path(__file__).with_name("codec_state_cases.py")
BEGIN = "the state of step 2 in memory"
LOST = BEGIN + ": nobody has what {} ranks had not sent yet of their gradients"
DROPPED = {
    "4 -> 3": LOST.format("1 of 4"),
    "4 -> 3, none lost": None,
    "4 -> 3, low rank": LOST.format("1 of 4"),
    "pp2 dp2 uneven -> dp3": LOST.format("1 of 4"),
    "dp2 tp2 -> pp2 dp2": LOST.format("2 of 4"),
    "pp2 dp2 -> dp2 tp2": (
        BEGIN + ": the new plan does not compress layers.0.attention.wo.weight, layers.0.attention.wq.weight, "
        "layers.1.attention.wo.weight, …, of which the residuals are dropped"
    ),
    "by level -> 3": LOST.format("1 of 4"),
    "pp2 dp2 -> by level": (
        BEGIN + ": the new plan does not compress layers.0.attention.wo.weight, layers.0.attention.wq.weight, "
        "layers.1.attention.wo.weight, …, of which the residuals are dropped"
    ),
    "a spare": LOST.format("1 of 4"),
    "8 -> 5": LOST.format("3 of 8"),
    "8 -> 5, pp2 dp2 tp2": LOST.format("3 of 8"),
}
AFRESH = {
    "another codec": f"{BEGIN} is of another compression: what ranks had not sent yet of their gradients is dropped",
    "one replica": (
        f"{BEGIN} is of another layout of ranks, and the new plan keeps no residuals of replicas: what ranks had not "
        "sent yet of their gradients is dropped"
    ),
    "sharded": (
        f"{BEGIN} is of another layout of ranks, and the old plan keeps no residuals of replicas: what ranks had not "
        "sent yet of their gradients is dropped"
    ),
}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    four = run_cases(SCRIPT, "moved", 4, tmp_path_factory.mktemp("moved"))
    return four | run_cases(SCRIPT, "fewer", 8, tmp_path_factory.mktemp("fewer"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPED)
def test_with_another_plan_the_sum_of_all_residuals_stays(name: str, moved: dict[str, dict[str, Any]]) -> None:
    found = moved[name]
    assert found["before"] > 5
    # Half of a matrix of attention has too few numbers to be compressed.
    small = {f"layers.{layer}.attention.{of}.weight" for layer in range(4) for of in ("wq", "wo")}
    assert set(found["unequal"]) == (small if name in ("pp2 dp2 -> dp2 tp2", "pp2 dp2 -> by level") else set())
    assert found["dropped"] == DROPPED[name]
    # Warm-up does not begin again.
    assert bool(found["counts"]) == ((MOVED | FEWER)[name][0].codec.mode != "int4")
    assert found["steps"] == list(range(1, END + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", AFRESH)
def test_residuals_that_nobody_can_take_over_are_dropped_with_a_reason(
    name: str, moved: dict[str, dict[str, Any]]
) -> None:
    assert moved[name]["dropped"] == AFRESH[name]
    assert moved[name]["steps"] == list(range(1, END + 1))


@pytest.mark.slow
def test_from_snapshots_the_same_layout_of_ranks_continues_bit_by_bit(tmp_path: Path) -> None:
    found = run_cases(SCRIPT, "snapshots", 2, tmp_path)["snapshots"]
    assert found["unequal"] == []
    assert found["compared"] > 20
    assert found["dropped"] is None
    assert found["rows"]
