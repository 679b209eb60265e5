"""Equations (3) and (4), by hand and at their edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.plan.compression import DensityMapping, VarianceForm
from hpctrain.records.plan.sparsity import counts, sparsities

MAPPINGS: list[DensityMapping] = ["linear", "log", "rank"]


def test_equation_3_by_hand() -> None:
    found = sparsities([1.0, 2.0, 5.0], [1, 1, 1], form="paper")
    assert found == pytest.approx([0.95, 0.95 - 0.25 / 4, 0.7])


def test_the_size_of_a_layer_decides_in_the_papers_form_only() -> None:
    variances, sizes = [4.0, 3.0], [1000, 10]
    assert sparsities(variances, sizes, form="paper") == pytest.approx([0.7, 0.95])
    assert sparsities(variances, sizes) == pytest.approx([0.95, 0.7])


def test_logarithms_and_order_spread_what_one_large_layer_pushes_together() -> None:
    variances, sizes = [1e-8, 1e-6, 1e-4, 1.0], [1] * 4
    assert sparsities(variances, sizes, mapping="linear")[:3] == pytest.approx([0.95] * 3, abs=1e-3)
    assert sparsities(variances, sizes, mapping="log") == pytest.approx([0.95, 0.8875, 0.825, 0.7])
    assert sparsities(variances, sizes, mapping="rank") == pytest.approx([0.95, 0.95 - 0.25 / 3, 0.95 - 0.5 / 3, 0.7])


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_layers_that_all_vary_alike_are_sparse(mapping: DensityMapping) -> None:
    assert sparsities([2.0, 2.0], [1, 1], mapping=mapping) == [0.95, 0.95]
    assert sparsities([0.0], [5], mapping=mapping) == [0.95]
    assert sparsities([], [], mapping=mapping) == []


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_what_is_not_known_varies_most_and_zero_least(mapping: DensityMapping) -> None:
    found = sparsities([math.nan, 0.0, 1.0, 4.0, math.inf], [1] * 5, mapping=mapping)
    assert found[0] == found[4] == pytest.approx(0.7)
    assert found[1] == pytest.approx(0.95)
    assert all(math.isfinite(share) for share in found)


@given(
    st.lists(st.floats(allow_nan=True), min_size=1, max_size=8), st.sampled_from(MAPPINGS),
    st.sampled_from(["ours", "paper"]),
)  # fmt: skip
def test_sparsities_stay_within_their_limits(
    variances: list[float], mapping: DensityMapping, form: VarianceForm
) -> None:
    variances = [abs(variance) for variance in variances]
    found = sparsities(variances, [7] * len(variances), (0.5, 0.9), mapping, form)
    assert all(0.5 <= share <= 0.9 for share in found)


def test_equation_4_rounds_up_and_not_for_nothing() -> None:
    assert counts([0.95, 0.95, 0.7, 0.0], [1000, 1001, 10, 9]) == [50, 51, 3, 9]
