"""A search that leaves options says so, and its bound holds for them, too."""

from __future__ import annotations

import pytest

from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.limits import SearchLimits

pytestmark = pytest.mark.slow

LEFT = "Options that could be faster by the bound were left"


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
