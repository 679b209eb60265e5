"""Every plan is the same model: loss, gradients, norm and parameters equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import PLANS
from processes import run_cases

CASES = Path(__file__).with_name("cases.py")
BF16_STEP = 2**-8
"""Distance of neighbouring numbers of bf16, as a share of a number."""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "least"), [(1, 7), (2, 64), (3, 3), (4, 49), (6, 1), (8, 3)])
def test_equals_one_process(world: int, least: int, tmp_path: Path) -> None:
    results = run_cases(CASES, "equivalence", world, tmp_path)
    assert len(results) >= least
    for name, errors in results.items():
        plan = PLANS[name.removesuffix(", masked")][0]
        exact = plan.tensor_parallel_sums == "none"
        for figure in ("loss", "gradient", "norm", "validation", "parameter"):
            assert errors[figure] <= (1e-6 if exact else BF16_STEP), (name, errors)
        assert exact or errors["gradient"] > 1e-6, (name, errors)
        assert errors["evaluation"] <= 1e-6, (name, errors)  # validation sums exactly
        # Where the state is whole, sums begin before a rank's last action ends: those of a stage that is done, or of
        # buckets in the last backward.
        if plan.dp > 1 and plan.shards == 1 and (plan.tp == 1 or len(plan.stages) > plan.pp):
            assert errors["early"] <= -1, (name, errors)
        # A sharded state is summed within each backward at levels 2 and 3; at level 1 when a stage is done, and at once
        # if nodes then sum it.
        chunks = len(plan.stages) > plan.pp and plan.shards == plan.dp
        if plan.shards > 1 and (plan.zero > 1 or chunks):
            assert errors["under way"] <= -1, (name, errors)


@pytest.mark.slow
def test_a_checkpoint_of_one_plan_loads_into_every_other(tmp_path: Path) -> None:
    run_cases(CASES, "save", 4, tmp_path)
    names: set[str] = set()
    for world in (1, 2, 4):
        errors = run_cases(CASES, "load", world, tmp_path)
        names |= set(errors)
        assert all(error == 0.0 for error in errors.values()), errors
    everywhere = {"one", "pp2 uneven", "tp2 sequence", "tp2", "dp2 tp2", "pp4", "zero1 pp2 dp2 interleaved"}
    assert {f"pp2 dp2 uneven -> {name}" for name in everywhere} <= names
    for saved in ("zero3 dp2 tp2", "zero2 dp4 in pairs"):
        few = {"one", "pp2 interleaved", "tp2", "dp2 tp2", "zero1 dp2", "zero1 dp2 tp2", "zero1 dp4 in pairs"}
        assert {f"{saved} -> {name}" for name in few} <= names
    tied = {"one, tied", "pp1, two stages, tied", "pp2 V tied", "tp2 tied", "dp2 tp2 sequence, tied"}
    assert {f"pp2 tp2 sequence, tied -> {name}" for name in tied} <= names
    stacks = {"pp2 V, encoder-decoder", "pp4, encoder-decoder", "pp2 dp2 uneven, encoder-decoder"}
    assert {f"zero3 pp2 dp2, encoder-decoder -> {name}" for name in stacks} <= names
