"""The paper's rules by name: equation (1) by greedy co-location, equation (7) by a grid over M."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner.search.solve import equation_6, equation_7, greedy_colocation


def test_equation_7_as_printed():
    assert equation_7(4, 24, 8, 0.5, 0.1) == pytest.approx(4 / 24 * 8 * 0.5 + 7 * 0.1)


def test_equation_6_as_printed():
    assert equation_6(5.0, 1.5, 2.0) == equation_6(2.0, 1.5, 2.0) == 1.5


def test_a_deep_model_is_cut_every_four_to_six_blocks_as_equation_6_balances_best(plan, topology):
    made = plan(topology((1, 1, 1, 1, 1)), solver="paper", rows=32, dims={"layers": 12})
    blocks = {stop - start for start, stop in (stage.layers for stage in made.stages)}
    assert made.pp in (2, 3)
    assert blocks <= {4, 5, 6}
    assert (
        f"equation (6), the difference of its sides in seconds as mean over stages, chose pp {made.pp}" in made.notes[2]
    )
    assert "pp 2: " in made.notes[2]
    assert "pp 3: " in made.notes[2]


def test_equation_1_follows_the_short_distances():
    distance = np.array([[0, 9, 1, 9], [9, 0, 1, 2], [1, 1, 0, 9], [9, 2, 9, 0]], dtype=float)
    order, objective = greedy_colocation(distance, 4, message_bytes=10.0)
    assert order in ([0, 2, 1, 3], [3, 1, 2, 0])
    assert objective == pytest.approx(10.0 * (1 + 1 + 2))


def test_the_papers_plan_pipelines_over_nodes_and_says_its_objective(plan, topology):
    made = plan(topology((1, 1, 1)), solver="paper")
    assert made.solver == "paper"
    assert (made.pp, made.dp, made.tp) == (3, 1, 1)
    assert [stage.layers for stage in made.stages] == [(0, 2), (2, 4), (4, 6)]
    assert made.replicas[0].micro_batches in (2, 4, 8, 16)
    assert "equation (1)" in made.notes[0]
    assert "chose M=2" in made.notes[1], "at a fixed batch the printed formula tends to the smallest M"
    assert made.predicted.bound_s <= made.predicted.step_time_s["total"]


def test_tensor_parallelism_within_nodes_as_far_as_the_heads_allow(plan, topology):
    made = plan(topology((1, 1), devices=4), solver="paper")
    assert (made.pp, made.dp, made.tp) == (2, 1, 4)
    three_heads = plan(topology((1, 1), devices=4), solver="paper", dims={"dim": 96, "heads": 3})
    assert (three_heads.pp, three_heads.dp, three_heads.tp) == (2, 4, 1)


def test_a_slow_link_is_avoided_by_shortest_paths(plan, topology):
    made = plan(topology((1, 1, 1), links={(0, 1): (1e-3, 1e-6)}), solver="paper")
    assert made.replicas[0].devices[1] == ["local2:cpu0"]


def test_memory_decides_which_m_is_possible(plan, topology):
    free = plan(topology((1, 1)), solver="paper", rows=64, seq_len=256)
    tight = plan(topology((1, 1), memory=4.53e8), solver="paper", rows=64, seq_len=256)
    assert free.replicas[0].micro_batches < tight.replicas[0].micro_batches
    with pytest.raises(RefusedError, match="cannot fit with M of 2, 4, 8 or 16"):
        plan(topology((1, 1), memory=3.03e8), solver="paper", rows=64, seq_len=256)


def test_a_batch_that_no_m_divides_is_told(plan, topology):
    with pytest.raises(InputError, match=r"batch.global: found 5; .* needs a multiple of 2"):
        plan(topology((1, 1)), solver="paper", rows=5)


def test_the_searched_plan_is_at_least_as_fast(plan, topology):
    made = topology((1.0, 0.5, 1.0))
    assert plan(made).predicted.step_time_s["total"] <= plan(made, solver="paper").predicted.step_time_s["total"]
