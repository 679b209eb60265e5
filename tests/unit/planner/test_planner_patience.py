"""A search that leaves options says so, and its bound holds for them, too."""

from __future__ import annotations

import pytest

from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.limits import SearchLimits
from hpctrain.planner.search.best_first import best_first_search
from hpctrain.planner.search.space import SearchSpace

LEFT = "Options that could be faster by the bound were left"


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 9])
def test_what_a_short_search_leaves_is_told_and_bounded(topology, run, count):
    slow_links = topology([1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0][:count], default=(1e-3, 1e-8))
    asked = run(rows=4, dims={"layers": 4})
    long, short = (PlanRequest(limits=SearchLimits(best_first_work=((64, work),))) for work in (100_000, 1))
    whole = make_plan(asked, asked.spec(), slow_links, long)
    assert not any(note.startswith(LEFT) for note in whole.notes)
    early = make_plan(asked, asked.spec(), slow_links, short)
    assert any(note.startswith(LEFT) for note in early.notes)
    assert early.predicted.bound_s <= whole.predicted.step_time_s["total"] * (1 + 1e-9)
    # The search near the best options finds about the same plan.
    assert early.predicted.step_time_s["total"] <= 1.02 * whole.predicted.step_time_s["total"]


def test_a_search_that_finds_no_plan_near_a_known_step_has_a_bound_for_all_options(topology, run):
    """It ends without local search, and finds the same plan as without a limit where it does not."""
    asked = run(dims={"layers": 4})
    (work, _), pool = workload_of(asked, asked.spec()), make_device_pool(asked, topology([1.0, 0.5, 1.0]))
    whole, near, short = (SearchSpace(pool, CostModel(work, pool.links)) for _ in range(3))
    fastest_s = best_first_search(whole).best.total
    assert best_first_search(near, limit_s=0.85 * fastest_s).best.total == fastest_s
    early = best_first_search(short, limit_s=0.7 * fastest_s)
    assert early.best.total >= fastest_s
    assert not early.ended
    assert 0 < early.bound_s <= fastest_s
