"""Whoever looks for a mistake gets a place: a hash that says whether weights are the same, a layer, a rank, a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("debug_cases.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, from one launch of two ranks."""
    return run_cases(SCRIPT, "all", 2, tmp_path_factory.mktemp("debug"))


def test_the_hash_of_the_weights_does_not_depend_on_the_cut(found: dict[str, Any]) -> None:
    initial = found["hashes"]["initial"]
    assert len(initial) == 4
    assert len(set(initial.values())) == 1


def test_the_same_run_gives_the_same_weights(found: dict[str, Any]) -> None:
    trained = found["hashes"]["trained"]
    assert trained["tp2 0"] == trained["tp2 1"]
    assert trained["tp2 0"] not in found["hashes"]["initial"].values()


def test_replicas_that_differ_are_told(found: dict[str, Any]) -> None:
    assert found["divergence"] == "ranks 0 and 1 hold different weights: first in layers.2.attention.wq.weight"


def test_stage_times_are_told_by_direction(found: dict[str, Any]) -> None:
    whole, forward, backward = found["hashes"]["stage_times"]
    assert min(forward) > 0
    assert min(backward) > 0
    assert max(*forward, *backward) < max(whole) <= max(forward) + max(backward) + 1e-5


def test_a_ruined_weight_is_found_with_its_layer(found: dict[str, Any]) -> None:
    said = found["weight"]
    assert said.startswith("step 1, rank 1 (local1:cpu0): loss is nan; first in layer 3 (layers.3.feed_forward.w2): ")
    assert "forward output has " in said
    assert "; 1 of 3072 weights not finite. An earlier step ruined the weights" in said


def test_an_activation_that_is_no_number_is_found_where_it_begins(found: dict[str, Any]) -> None:
    """dp2 uneven: the second replica has one sequence in a micro-batch, and its first channel of 32 was spoilt."""
    said = found["activation"]
    assert said.startswith("step 2, rank 1 (local1:cpu0): loss is nan; first in layer 1 (layers.1.attention_norm): ")
    assert "forward input has 16 of 512 values not finite; weights finite, the largest 1" in said
    assert said.endswith(". Lower optimizer.lr (0.001 now)")


def test_a_gradient_that_is_no_number_is_found_where_backward_met_it_first(found: dict[str, Any]) -> None:
    said = found["gradient"]
    assert said.startswith("step 1, rank 0 (local0:cpu0): the gradient's norm is ")
    assert "first in layer 2 (layers.2.attention.wk): gradient of weight has " in said
    assert "weights finite, the largest 0.0" in said


def test_what_happens_in_training_alone_is_found_where_it_happened(found: dict[str, Any]) -> None:
    """In evaluation nothing is drawn, and every value is a number. Masks are none the worse for holding -inf."""
    said = found["training"]
    assert "first in layer 1 (layers.1.dropping): forward output has " in said
    assert "it cannot be found again" not in said


def test_what_happens_in_validation_alone_is_found_too(found: dict[str, Any]) -> None:
    assert "layer 1 (layers.1.feed_forward): forward output has " in found["validation"]
    assert found["validation"].startswith("validation after step 1, rank ")


def test_a_rank_that_waits_in_vain_says_where_and_for_whom(found: dict[str, Any]) -> None:
    sleeping = found["sleeping"]
    assert sleeping["said"].startswith("rank 0 in step 1, recv gradient for stage 0 micro-batch "), sleeping
    # Not because the other one went away: it sleeps for longer than twice the progress timeout.
    assert re.search(r" from rank 1: .*[Tt]imed out", sleeping["said"]), sleeping
    assert sleeping["seconds"] >= 8
