"""The same plan on other figures: what a change costs, and that nothing else changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from topologies_made import run_of, topology_of

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.planner import make_plan
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes, plan_without
from hpctrain.planner.simulate.engine import critical_path
from hpctrain.planner.simulate.jitter import LinkJitter, sample_step_times
from hpctrain.planner.simulate.predict import predict, simulate_step
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import DeviceType

pytestmark = pytest.mark.usefixtures("short_annealing")

FIRST, SECOND = DeviceId("local0:cpu0"), DeviceId("local1:cpu0")
PLANS = [
    {"pp": 2, "dp": 2, "tp": 1, "schedule": "1f1b", "micro_batch": 2},
    {"pp": 2, "dp": 2, "tp": 1, "schedule": "interleaved_1f1b", "micro_batch": 2},
    {"pp": 2, "dp": 1, "tp": 1, "schedule": "zbv", "micro_batch": 2},
    {"pp": 1, "dp": 4, "tp": 1, "zero": 2, "recompute": "full"},
    {"pp": 1, "dp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 3, "dp": 1, "tp": 1, "schedule": "interleaved_zero_bubble"},
]


def total(run, plan, topology):
    scene = layout_of_plan(run, run.spec(), plan, topology)
    return predict(scene.cost, scene.layout).total


def test_slow_nodes_slow_links_and_nothing_else(plan, run, topology):
    made = topology((1.0, 1.0, 1.0), links={(0, 1): (5e-5, 1e-9)})
    found = plan(made, parallel={"mode": "fixed", "pp": 3, "dp": 1, "tp": 1})
    before = total(run(), found, made)
    slower = apply_changes(made, TopologyChanges(slow={"local1": 0.5}))
    assert 1.3 * before < total(run(), found, slower) < 2.2 * before
    assert LinkCost(slower).between("local0", "local2") == (5e-5, 1e-9)
    narrow = apply_changes(made, TopologyChanges(links={("local1", "local0"): 0.1}))
    costs = LinkCost(narrow)
    assert costs.between("local0", "local1") == pytest.approx((5e-5, 1e-8))
    assert costs.between("local1", "local2") == (5e-5, 1e-9)
    assert total(run(), found, narrow) > before


def test_a_slow_node_does_not_slow_the_links_inside_others(topology):
    made = topology((1.0, 1.0), devices=2)
    before = LinkCost(made).between("local1", "local1")
    assert LinkCost(apply_changes(made, TopologyChanges(slow={"local0": 0.1}))).between("local1", "local1") == before


def test_lost_nodes_are_planned_for_as_the_agents_do(run, topology):
    made = topology((1.0, 1.0, 1.0))
    fixed = run(parallel={"mode": "fixed", "pp": 3, "dp": 1, "tp": 1})
    plan, remark = plan_without(fixed, fixed.spec(), made, ("local2",))
    assert set(plan.nodes) <= {"local0", "local1"}
    assert "without parallel.mode fixed" in remark
    spared = run(recovery={"spares": 1})
    assert len(plan_without(spared, spared.spec(), made, ("local0",))[0].nodes) == 2
    few = run(recovery={"min_nodes": 3})
    with pytest.raises(RefusedError, match=r"2 nodes would be left, recovery\.min_nodes is 3"):
        plan_without(few, few.spec(), made, ("local0",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (TopologyChanges(slow={"local9": 0.5}), "found node local9, not in the topology"),
        (TopologyChanges(links={("local0", "local0"): 0.5}), "the same node twice"),
        (TopologyChanges(slow={"local0": 0.0}), "found the factor 0; allowed: 1e-06 to 1e"),
        (TopologyChanges(slow={"local0": 1e-300}), "found the factor 1e-300; allowed: 1e-06"),
        (TopologyChanges(links={("local0", "local1"): 1e300}), "found the factor 1e\\+300; allowed: 1e-06"),
    ],
)
def test_changes_that_cannot_be(changes, message, topology):
    with pytest.raises(InputError, match=message):
        apply_changes(topology(), changes)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_plan_at_the_largest_and_smallest_factor_has_a_finite_step(factor, plan, run, topology):
    made = topology((1.0, 1.0), default=(0.0, 0.5))
    changed = apply_changes(made, TopologyChanges(slow={"local0": factor}, links={("local0", "local1"): factor}))
    found = plan(made, parallel={"mode": "fixed", "pp": 2, "dp": 1, "tp": 1})
    scene = layout_of_plan(run(), run().spec(), found, changed)
    assert 0 < predict(scene.cost, scene.layout).total < float("inf")


def test_what_a_hand_wrote_into_the_plan_is_not_guessed_at(plan, run, topology):
    degrees = {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4}
    found = plan(topology(), parallel={"mode": "fixed", "schedule": "1f1b", **degrees})
    rows = {rank: list(row) for rank, row in found.actions[0].items()}
    rows[0] = [*(text for text in rows[0] if "F" in text), *(text for text in rows[0] if "B" in text)]
    cases = [
        ({"actions": {0: rows}}, "actions"),
        ({"stages": [found.stages[0].model_copy(update={"recompute": "full"}), *found.stages[1:]]}, "recompute"),
    ]
    for update, word in cases:
        with pytest.raises(InputError, match=word):
            layout_of_plan(run(), run().spec(), found.model_copy(update=update), topology())
    with pytest.raises(InputError, match="not in the topology"):
        layout_of_plan(run(), run().spec(), found, topology((1.0,)))
    with pytest.raises(InputError, match=r"batch\.global is 32"):
        layout_of_plan(run(rows=32), run().spec(), found, topology())


def test_a_plan_by_hand_over_a_link_that_carries_nothing_is_one_line(plan, run, topology):
    found = plan(topology(), parallel={"mode": "fixed", "pp": 2, "dp": 1, "tp": 1})
    whole = topology()
    broken = whole.model_copy(update={"fabric": whole.fabric.model_copy(update={"broken": [("local1", "local0")]})})
    with pytest.raises(InputError, match=r"local1:cpu0 and node local0 are both used, but .* their link is broken"):
        layout_of_plan(run(), run().spec(), found, broken)
    unmeasured = whole.model_copy(update={"fabric": whole.fabric.model_copy(update={"classes": []})})
    with pytest.raises(InputError, match=r"fabric\.links: no alpha_s and beta_s_per_byte between local0 and local1"):
        layout_of_plan(run(), run().spec(), found, unmeasured)


def test_a_plan_by_hand_over_devices_of_two_kinds_is_one_line(plan, run, topology):
    found = plan(topology(), parallel={"mode": "fixed", "pp": 2, "dp": 1, "tp": 1})
    made = topology((1.0, 2.0))
    types = {"type1.0": made.device_types["type1.0"], "type2.0": DeviceType(kind="cuda", name="a card")}
    with pytest.raises(InputError, match="local1:cpu0 is a cuda device and local0:cpu0 is none"):
        layout_of_plan(run(), run().spec(), found, made.model_copy(update={"device_types": types}))


@pytest.fixture(scope="module", params=PLANS, ids=lambda parallel: ", ".join(map(str, parallel.values())))
def planned(request):
    """A topology, the plan that is made on it, and its scene when it is read back."""
    made = topology_of((1.0, 1.0, 0.8, 0.8))
    asked = run_of(parallel={"mode": "fixed", **request.param})
    plan = make_plan(asked, asked.spec(), made)
    return made, plan, layout_of_plan(asked, asked.spec(), plan, made)


def test_a_plan_read_back_takes_as_long_as_it_says(planned):
    _, plan, scene = planned
    assert predict(scene.cost, scene.layout).total == pytest.approx(plan.predicted.step_time_s["total"])


def test_the_critical_path_has_no_gaps_and_ends_with_the_pipeline(planned):
    _, _, scene = planned
    step = simulate_step(scene.cost, scene.layout)
    line = step.lines[step.last]
    segments = critical_path(line)
    assert segments[0].start == 0
    assert segments[-1].end == pytest.approx(line.makespan)
    for before, after in itertools.pairwise(segments):
        assert after.start - before.end == pytest.approx(after.waited)


def test_drawn_steps_without_noise_are_the_predicted_one(planned):
    made, _, scene = planned
    drawn = sample_step_times(scene.cost, scene.layout, LinkJitter(made), 10, np.random.default_rng(0))
    assert drawn == pytest.approx(np.full(10, predict(scene.cost, scene.layout).total))


def test_noise_is_repeatable_and_late_messages_only_delay(plan, run, topology, late_links):
    made = late_links(topology((1.0, 1.0)), 5e-3)
    found = plan(made, parallel={"mode": "fixed", "pp": 2, "dp": 1, "tp": 1})
    scene = layout_of_plan(run(), run().spec(), found, made)

    def draw(seed, variation=0.0):
        return sample_step_times(
            scene.cost, scene.layout, LinkJitter(made), 400, np.random.default_rng(seed), variation
        )

    assert (draw(1) == draw(1)).all()
    assert (draw(1) != draw(2)).any()
    assert draw(1).min() >= predict(scene.cost, scene.layout).total
    assert draw(1, 0.3).std() > draw(1).std()


def test_measured_spread_is_met_by_a_single_message(topology, late_links):
    made = late_links(topology((1.0, 1.0)), 2e-3)
    mean = LinkJitter(made).mean_s([FIRST], [SECOND])
    drawn = np.random.default_rng(0).exponential(mean, 100_000)
    p50, p95 = np.quantile(drawn, [0.5, 0.95])
    assert p95 - p50 == pytest.approx(2e-3 - 5e-5, rel=0.05)


def test_of_many_nodes_the_spread_is_that_of_the_matrix(topology):
    made = topology((1.0, 1.0))
    pairs = PairMatrix([node.id for node in made.nodes])
    pairs["latency_p50_s"][0, 1], pairs["latency_p95_s"][0, 1] = 5e-5, 2e-3
    jitter = LinkJitter(made.with_pairs(pairs))
    assert jitter.mean_s([FIRST], [SECOND]) == pytest.approx(1.95e-3 / np.log(10), rel=1e-4)
    assert jitter.mean_s([SECOND], [FIRST]) == 0
