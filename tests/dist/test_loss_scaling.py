"""fp16: an overflow is skipped by all ranks alike, training recovers, and a checkpoint carries the scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("scale_cases.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(SCRIPT, "all", 2, tmp_path_factory.mktemp("scale"))


@pytest.mark.slow
def test_an_overflow_changes_no_weight_and_training_recovers(found: dict[str, Any]) -> None:
    overflow = found["overflow"]
    rows = overflow["straight"]
    skipped = [row[1] for row in rows]
    count = sum(skipped)
    assert skipped[0]
    assert not all(skipped), "gradients fit as soon as the scale is low enough; they may grow beyond it once more"
    assert [row[0] for row in rows] == [2.0 ** (20 - sum(skipped[:index])) for index in range(len(rows))]
    assert [row[2] is None for row in rows] == skipped
    assert overflow["moved"] == 0.0
    assert overflow["learned"] > 0
    good = skipped[::-1].index(True)
    assert overflow["saved"] == {"value": 2.0 ** (20 - count), "good_steps": good, "skipped": count}


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_one_bit_by_bit(found: dict[str, Any]) -> None:
    assert found["overflow"]["apart"] == 0.0
    assert found["overflow"]["resumed"] == found["overflow"]["straight"]


@pytest.mark.slow
def test_every_form_of_plan_trains_in_fp16(found: dict[str, Any]) -> None:
    assert len(found["losses"]) == 5
    for name, losses in found["losses"].items():
        assert losses["fp16"] == pytest.approx(losses["fp32"], abs=2e-3), name
        # One loss may round to the same number in both; thousands of weights do not.
        assert losses["apart"] > 0, name


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_not_blamed_on_the_scale(found: dict[str, Any]) -> None:
    assert found["nan"].startswith(
        "step 1, rank 1 (local1:cpu0): loss is nan; first in layer 3 (layers.3.attention_norm)"
    )
