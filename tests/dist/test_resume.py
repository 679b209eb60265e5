"""A run that was stopped and resumed is the run that was not: bit by bit on the same plan, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("resume_cases.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases, from one launch."""
    return run_cases(SCRIPT, "all", 2, tmp_path_factory.mktemp("resume"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp2 uneven", "pp2 V", "tp2"])
def test_on_the_same_plan_resuming_changes_no_bit_of_the_losses(plan: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[plan] == {"losses": True, "valid": True, "valid is quiet": True}


@pytest.mark.slow
def test_on_the_same_plan_resuming_changes_no_bit_of_the_state(results: dict[str, dict[str, Any]]) -> None:
    assert results["states"]["compared"] > 50
    assert results["states"]["unequal"] == 0.0


@pytest.mark.slow
def test_on_another_plan_the_losses_stay_the_same_numbers(results: dict[str, dict[str, Any]]) -> None:
    assert results["dp2, then pp2"]["loss"] <= 1e-6


@pytest.mark.slow
def test_dropout_did_draw(results: dict[str, dict[str, Any]]) -> None:
    assert results["dp2, then pp2"]["draws"]


@pytest.mark.slow
def test_gradients_leave_while_the_backward_pass_runs(results: dict[str, dict[str, Any]]) -> None:
    """Six steps: in the first, every bucket leaves after it, because what to expect is only counted then."""
    found = results["departures"]
    assert found["losses"] == found["expected"]
    assert found["late"] > 3
    assert found["early"] == 5 * found["late"]
