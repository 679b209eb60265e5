"""A search that leaves options says so, and its bound holds for them, too."""

from __future__ import annotations

import pytest

from hpctrain.planner import make_plan
from hpctrain.planner.search import best_first

LEFT = "Options that could be faster by the bound were left"


@pytest.mark.parametrize("count", [6, 9])
def test_what_patience_leaves_is_told_and_bounded(topology, run, count, monkeypatch):
    slow_links = topology([1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0][:count], default=(1e-3, 1e-8))
    asked = run(rows=4, dims={"layers": 4})
    monkeypatch.setattr(best_first, "FULL_PATIENCE", 10_000)
    whole = make_plan(asked, asked.spec(), slow_links)
    assert not any(note.startswith(LEFT) for note in whole.notes)
    monkeypatch.setattr(best_first, "FULL_PATIENCE", 1)
    short = make_plan(asked, asked.spec(), slow_links)
    # On few devices a search ends only when nothing can win.
    assert any(note.startswith(LEFT) for note in short.notes) == (count > 8)
    assert short.predicted.bound_s <= whole.predicted.step_time_s["total"] <= short.predicted.step_time_s["total"]
