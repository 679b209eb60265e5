"""Plans by other objectives than time, and constraints on them."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.search.objective import GoodputConstraint, Objective, p95_step_s
from hpctrain.planner.simulate.jitter import LinkJitter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_annealing")]


def planned(run, topology, **objective):
    return make_plan(run, run.spec(), topology, PlanRequest(objective=Objective(**objective)))


def robust(run, plan, topology):
    scene = layout_of_plan(run, run.spec(), plan, topology)
    return p95_step_s(scene.cost, scene.layout, LinkJitter(topology), len(topology.nodes))


def seconds(plan):
    return plan.predicted.step_time_s["total"]


def joules(plan, topology, watts):
    return seconds(plan) * sum(watts[topology.device(place).type] for place in plan.ranks)


@pytest.mark.parametrize(("nodes", "p95"), [(3, 2e-2), (4, 2e-2), (4, 5e-2)])
def test_robust_differs_from_time_and_is_better_by_its_own_measure(nodes, p95, run, topology, late_links):
    made = late_links(topology((1.0,) * nodes), p95)
    fast, safe = planned(run(), made), planned(run(), made, goal="robust")
    assert seconds(fast) < seconds(safe)
    assert robust(run(), safe, made) < robust(run(), fast, made)
    assert any("Chosen by robust" in note for note in safe.notes)
    assert any("robust is" in entry.reason for entry in safe.rejected)


def test_a_slow_node_harms_a_plan_by_its_part_in_it(run, topology):
    made = topology((1.0, 1.0))
    plan = planned(run(), made, goal="robust")
    assert seconds(plan) < robust(run(), plan, made) <= 2.2 * seconds(plan)


def test_energy_leaves_out_what_takes_more_than_it_gives(run, topology):
    made = topology((1.0, 1.0, 0.5, 0.5))
    watts = {"type1.0": 100.0, "type0.5": 400.0}
    fast, frugal = planned(run(), made), planned(run(), made, goal="energy", watts=watts)
    assert joules(frugal, made, watts) < joules(fast, made, watts)
    assert set(frugal.nodes) <= {"local0", "local1"}


def test_cost_follows_the_prices(run, topology):
    made = topology((1.0, 1.0, 0.5))
    dear = planned(run(), made, goal="cost", prices={"type1.0": 100.0, "type0.5": 1.0})
    cheap = planned(run(), made, goal="cost", prices={"type1.0": 1.0, "type0.5": 100.0})
    assert dear.nodes == ["local2"]
    assert "local2" not in cheap.nodes
    assert any(entry.delta_s is not None and entry.delta_s < 0 for entry in dear.rejected)


def test_a_type_without_a_figure_is_named(run, topology):
    with pytest.raises(InputError, match=r"power of type1\.0 is not known; give --power type1\.0=WATTS"):
        planned(run(), topology(), goal="energy")


def test_memory_may_be_limited_further(run, topology):
    made = topology((1.0, 1.0), memory=None)
    peak = max(planned(run(), made).predicted.memory_bytes.values())
    made = topology((1.0, 1.0), memory=2 * peak)
    tight = planned(run(), made, usable=0.45)
    assert max(tight.predicted.memory_bytes.values()) <= 0.45 * 2 * peak
    with pytest.raises(RefusedError, match=r"of which 5 % \("):
        planned(run(), made, usable=0.05)


def test_a_least_goodput_is_kept_with_fewer_nodes_or_refused(run, topology):
    asked, made = run(checkpoint={"every": 100}), topology((1.0,) * 4)
    fast = planned(asked, made)

    def bounded(least):
        goodput_constraint = GoodputConstraint(least=least, node_mtbf_s=3600.0, recover_s=60.0, checkpoint_every=100)
        return planned(asked, made, goodput_constraint=goodput_constraint)

    assert len(bounded(0.5).nodes) == len(fast.nodes) == 4
    assert len(bounded(0.96).nodes) < 4
    with pytest.raises(RefusedError, match=r"no plan keeps 0\.99; the best"):
        bounded(0.99)
