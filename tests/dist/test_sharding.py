"""Sharding frees the memory that its level promises, and its bytes are counted as the ring sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_cases

SCRIPT = Path(__file__).with_name("shard_cases.py")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(SCRIPT, "two", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(SCRIPT, "four", 4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_replicas_hold_half_of_the_state_each(zero: int, of_two: dict[str, dict[str, Any]]) -> None:
    found = of_two[f"memory {zero}"]
    assert found["weights"] == pytest.approx(0.5, rel=0.02)
    assert found["moments"] == pytest.approx(2 * 0.5, rel=0.02)
    assert found["gradients"] == pytest.approx(0.5, rel=0.02)


@pytest.mark.slow
def test_level_1_keeps_weights_and_gradients_whole_through_the_step(of_two: dict[str, dict[str, Any]]) -> None:
    assert of_two["memory 1"]["between"] == [1.0, 1.0]
    assert of_two["memory 1"]["within"] == [1.0, 1.0]


@pytest.mark.slow
def test_level_2_never_has_the_whole_gradient(of_two: dict[str, dict[str, Any]]) -> None:
    """Between micro-batches nothing of it is left; within the backward, what belongs to no block waits: the head."""
    assert of_two["memory 2"]["between"] == [1.0, 0.0]
    weights, gradients = of_two["memory 2"]["within"]
    assert weights == 1.0
    assert 0 < gradients < 0.05


@pytest.mark.slow
def test_level_3_has_weights_only_around_their_use(of_two: dict[str, dict[str, Any]]) -> None:
    """A block is 0.23 of this model, embedding and head are 0.08: one block is whole at a time, or two in passing."""
    assert of_two["memory 3"]["between"] == [0.0, 0.0]
    weights, gradients = of_two["memory 3"]["within"]
    assert 0.2 < weights < 0.6
    assert 0 < gradients < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "gathers", "sums"),
    [(1, 1, 1), (2, 1, 2), (3, 4, 2)],
)
def test_bytes_by_level(zero: int, gathers: int, sums: int, of_two: dict[str, dict[str, Any]]) -> None:
    """Two ranks, two micro-batches: each collective over the whole model sends half of it from each rank, by gloo's own
    report too: its reduce-scatter would send twice that. In bf16 only the gathers are halved."""
    found = of_two[f"traffic {zero}"]
    assert found["counted"] == pytest.approx(0.5 * gathers + 0.5 * sums, rel=1e-9)
    assert found["reported"] == pytest.approx(found["counted"], rel=1e-9)
    assert found["bf16"] == pytest.approx(0.25 * gathers + 0.5 * sums, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "gathers", "sums"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_copies_of_a_state_exchange_it_once_a_step(
    zero: int, gathers: int, sums: int, of_four: dict[str, dict[str, Any]]
) -> None:
    """Four replicas in pairs: to the traffic within a pair comes one all-reduce of a half between the pairs."""
    found = of_four[f"pairs {zero}"]
    assert found["counted"] == pytest.approx(0.5 * gathers + 0.5 * sums + 0.5, rel=1e-9)
    assert found["reported"] == pytest.approx(found["counted"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_is_that_of_the_plan_without_sharding(zero: int, of_four: dict[str, dict[str, Any]]) -> None:
    """Up to the rounding of embedding and norms (2⁻⁸), which autocast alone leaves in fp32."""
    found = of_four[f"bf16 {zero}"]
    assert found["same dtypes"], found
    assert found["loss"] <= 1e-3, found
    assert found["gradient"] <= 2**-6, found


GATHER, SUM = "gather weights of stage 0", "sum gradients of stage 0 over replicas"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "operation"),
    [("1 start", GATHER), ("1 end", SUM), ("2 backward", SUM), ("3 forward", GATHER)],
)
def test_a_replica_that_waits_for_another_says_so(case: str, operation: str, of_two: dict[str, dict[str, Any]]) -> None:
    """The other one is late at one place of the step; nobody may blame this one."""
    assert of_two[f"waiting {case}"] == [operation, True]


@pytest.mark.slow
def test_a_pair_that_waits_for_the_other_pair_says_so(of_four: dict[str, dict[str, Any]]) -> None:
    operation, waits = of_four["waiting for the other pair"]
    assert operation.startswith("all-reduce over dp, bucket ")
    assert waits


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "bf16", "int8"])
def test_copies_of_a_block_are_summed_when_its_shards_are(mode: str, of_four: dict[str, dict[str, Any]]) -> None:
    """At the latest when the second block after it begins its own sum."""
    found = of_four[f"copies {mode}"]
    assert min(found["more"]) >= found["blocks"] - 1
    assert found["differ"] == 0
