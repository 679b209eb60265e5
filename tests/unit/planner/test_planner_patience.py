"""A search that leaves options says so, and its bound holds for them, too."""

from __future__ import annotations

import pytest

from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.limits import SearchLimits

LEFT = "Options that could be faster by the bound were left"


@pytest.mark.parametrize("count", [6, 9])
def test_what_patience_leaves_is_told_and_bounded(topology, run, count):
    slow_links = topology([1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0][:count], default=(1e-3, 1e-8))
    asked = run(rows=4, dims={"layers": 4})
    patient, impatient = (PlanRequest(limits=SearchLimits(full_patience=patience)) for patience in (10_000, 1))
    whole = make_plan(asked, asked.spec(), slow_links, patient)
    assert not any(note.startswith(LEFT) for note in whole.notes)
    short = make_plan(asked, asked.spec(), slow_links, impatient)
    # On few devices a search ends only when nothing can win.
    assert any(note.startswith(LEFT) for note in short.notes) == (count > 8)
    assert short.predicted.bound_s <= whole.predicted.step_time_s["total"] <= short.predicted.step_time_s["total"]
