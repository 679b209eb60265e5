"""Low-rank products, TAGC and local steps: sums, residuals, bytes and what survives a restart, on three ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("product_cases.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(SCRIPT, "all", 3, tmp_path_factory.mktemp("products"))


@pytest.mark.slow
def test_sums_within_the_rank_are_exact(found: dict[str, Any]) -> None:
    case = found["low rank"]
    # Factors in bf16 keep 8 bits.
    assert case["spanned"] < 2**-7
    assert case["exempt"] < 1e-4
    assert case["bf16"] < 0.015
    assert case["bytes"][0] == case["bytes"][1]
    assert case["warm-up"] < 1e-5
    assert case["state"] == [f"{kind}.{index}" for kind in ("q", "residual") for index in (0, 1, 2, 6)] + ["steps"]


@pytest.mark.slow
def test_messages_with_a_rank_of_the_width_have_the_stated_bytes(found: dict[str, Any]) -> None:
    assert all(0.95 < share <= 1 for share in found["low rank, bytes"].values())


@pytest.mark.slow
def test_what_a_product_leaves_out_arrives_in_later_steps(found: dict[str, Any]) -> None:
    assert found["low rank"]["mean of steps"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["low rank", "low rank, int2", "low rank, int1", "tagc"])
def test_what_was_applied_and_the_residuals_are_all_there_was(found: dict[str, Any], reducer: str) -> None:
    case = found[f"{reducer}, conserved"]
    assert case["error"] < 1e-4
    assert case["held"] > 0.1
    assert case["told"] == pytest.approx(1.0, rel=1e-4)
    assert case["differing"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["low rank", "tagc"])
def test_what_is_not_finite_is_seen_everywhere_and_touches_no_residual(found: dict[str, Any], reducer: str) -> None:
    assert found[f"{reducer}, not finite"] == {"seen": [True, True], "moved": 0.0, "finite after": True}


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["low rank", "tagc"])
def test_a_state_is_gone_on_from_bit_by_bit(found: dict[str, Any], reducer: str) -> None:
    assert found[f"{reducer}, resumed"] == {"error": 0.0, "joined differing": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ["auto", "sketch"])
def test_chosen_numbers_are_summed_bit_by_bit(found: dict[str, Any], ratio: str) -> None:
    case = found["tagc"][ratio]
    assert case["error"] == 0.0
    assert case["unread"] == 0.0
    assert case["bytes"][0] == case["bytes"][1]


@pytest.mark.slow
def test_the_published_index_of_single_bits_loses_positions_and_that_of_four_does_not(found: dict[str, Any]) -> None:
    case = found["published"]
    assert case["exact"] == {"union": True, "4bit": True, "1bit": False}
    assert case["1bit"]
    # 999 numbers of three ranks: slices of 42 bytes there and back; 500 and 125 bytes in a ring.
    assert case["bytes"] == [2 * 2 * 42, 2 * 2 * 500 // 3, 2 * 2 * 125 // 3]
    assert case["4bit, sums"] == 0.0
    assert case["1bit, error"] > 0.1
    assert case["1bit, differing"] == 0.0


@pytest.mark.slow
def test_an_overloaded_sketch_loses_nothing(found: dict[str, Any]) -> None:
    case = found["tagc, overloaded"]
    assert case["unread"] > 0.5
    assert case["error"] < 1e-4
    assert case["differing"] == 0.0


@pytest.mark.slow
def test_a_flush_leaves_no_residual(found: dict[str, Any]) -> None:
    assert found["tagc, flushed"] == 0.0


@pytest.mark.slow
def test_replicas_meet_where_nesterov_takes_them(found: dict[str, Any]) -> None:
    case = found["local steps"]
    assert case["error"] < 1e-5
    assert case["differing"] == 0.0
    assert case["sent"][0] == case["sent"][2] == 0
    assert case["sent"][3] == 2 * 2 * 4 * 24 // 3
    assert "outer_sync" in case["refused"]


@pytest.mark.slow
def test_replicas_go_on_together_or_begin_anew_together(found: dict[str, Any]) -> None:
    case = found["local steps"]
    assert case["resumed"] == case["newcomer"] == 0.0
    assert case["blind"] == case["moved"] == 0.0


@pytest.mark.slow
def test_changes_of_weights_by_integers_lose_nothing(found: dict[str, Any]) -> None:
    case = found["integers"]
    assert case["error"] < 1e-4
    assert case["held"] > 0.01
    assert case["differing"] == case["resumed"] == 0.0
    assert case["bytes"][0] == case["bytes"][1]


@pytest.mark.slow
def test_parts_of_the_weights_meet_one_after_the_other(found: dict[str, Any]) -> None:
    case = found["streaming"]
    assert case["spread"][0] == [True] * 4
    assert case["spread"][1] == [False, False, True, True]
    assert case["spread"][3] == [True, True, False, False]
    assert case["spread"][5] == [False, False, True, True]
    assert [bytes_ > 0 for bytes_ in case["sent"]] == [False, True, False, True, False, True]
    assert case["met"] == 0.0


@pytest.mark.slow
def test_steps_during_an_outer_sync_are_not_lost(found: dict[str, Any]) -> None:
    assert found["overlapping"]["fp32"] < 1e-5
    assert 0 < found["overlapping"]["int8"] < 0.05
