"""The worker's training loop does what a plain loop in torch does, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("loop_cases.py")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases of two ranks, from one launch."""
    return run_cases(SCRIPT, "all", 2, tmp_path_factory.mktemp("loop"))


def check_training(results: dict[str, dict[str, Any]]) -> None:
    for name, found in results.items():
        for key, limit in {"loss": 1e-6, "valid": 1e-6, "norm": 1e-6, "lr": 1e-12, "parameter": 1e-6}.items():
            assert found[key] <= limit, (name, found)
        if "pp2" not in name:
            assert found["bubble"] == [None] * 5, name


@pytest.mark.slow
def test_training_on_one_rank_equals_a_plain_loop(tmp_path: Path) -> None:
    results = run_cases(SCRIPT, "all", 1, tmp_path)["training"]
    assert list(results) == ["one", "two stages"]
    check_training(results)


@pytest.mark.slow
def test_training_on_two_ranks_equals_a_plain_loop(of_two: dict[str, dict[str, Any]]) -> None:
    assert len(of_two["training"]) == 6
    check_training(of_two["training"])


@pytest.mark.slow
def test_the_bubble_is_the_waiting_within_the_schedule(of_two: dict[str, dict[str, Any]]) -> None:
    """Two equal stages and a single micro-batch: of 6 units the first rank computes 3, of 4 the second one 3."""
    found = of_two["bubble"]
    assert found["measured"] == pytest.approx((1 / 2 + 1 / 4) / 2, abs=0.05), found
    assert found["stage_time_s"] == pytest.approx([0.9, 0.9], rel=0.3)


@pytest.mark.slow
def test_a_failed_validation_costs_neither_checkpoint_nor_row(of_two: dict[str, dict[str, Any]]) -> None:
    assert of_two["failing"] == {"said": "the validation data is gone", "saved": 2, "steps": [1, 2]}


@pytest.mark.slow
def test_a_validation_loss_that_is_no_number_ends_the_run(of_two: dict[str, dict[str, Any]]) -> None:
    assert of_two["ruined"].startswith("validation after step 2, rank 0 (local0:cpu0): loss is nan; first in embedding")


@pytest.mark.slow
def test_the_log_of_the_ranks_says_who_is_slow_and_who_waits(of_two: dict[str, dict[str, Any]]) -> None:
    """Means over five steps after the first; the other replica waits where the slow one sleeps."""
    *rows, whole = of_two["slow_rank"]
    assert [(row["rank"], row["device"], row["step"], row["steps"]) for row in rows] == [
        (rank, f"local{rank}:cpu0", step, 5) for step in (6, 11) for rank in (0, 1)
    ]
    assert all("layers" not in row for row in rows[:2])
    first, second = rows[2:]
    (slept,), (did_not,) = second["forward_s"], first["forward_s"]
    assert slept >= 0.3
    assert slept == pytest.approx(whole["forward_s"], abs=1e-5)
    longer = slept + second["backward_s"][0] - did_not - first["backward_s"][0]
    assert first["wait_dp_s"] + first["wait_world_s"] >= longer - 0.2
    assert first["wait_pp_s"] == second["wait_pp_s"] == first["wait_device_s"] == 0
    for layers in (first["layers"], second["layers"]):
        assert [layer["layer"] for layer in layers] == ["embedding", "0", "1", "2", "3", "norm", "head"]
        assert all(0 < layer["gradient_density"] <= 1 and layer["numbers"] > 0 for layer in layers)
        assert [layer["layer"] for layer in layers if "forward_s" in layer] == ["0", "1", "2", "3"]
        assert all(layer["forward_s"] > 0 and layer["backward_s"] > 0 for layer in layers[1:5])
    # Replicas have the same sums.
    assert [layer["gradient_density"] for layer in first["layers"]] == [
        layer["gradient_density"] for layer in second["layers"]
    ]
