"""A plan that replaces another after a loss: state stays where it is, and the rest is listed."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.bench.planner.search import SearchCase, scene_of_case
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import make_tensor_parallel_groups
from hpctrain.planner.make import search_space_of
from hpctrain.planner.search.replacement import make_warm_start, moves_between, surviving_placement
from hpctrain.records.plan.compression import AutoCompression

pytestmark = pytest.mark.usefixtures("short_annealing")

PIPELINES = {"mode": "fixed", "pp": 4, "dp": 2, "schedule": "1f1b"}


def holders(plan):
    """Device -> blocks."""
    held = {}
    for replica in plan.replicas:
        for stage, row in zip(plan.stages, replica.devices, strict=True):
            for place in row:
                held.setdefault(place, set()).update(range(*stage.layers))
    return held


def test_a_node_that_takes_over_is_the_only_one_that_is_sent_state(topology, run):
    asked, whole = run(parallel=PIPELINES, dims={"layers": 8}), topology([1.0] * 9)
    before = make_plan(asked, asked.spec(), whole)
    lost = before.nodes[2]
    left = whole.only([node.id for node in whole.nodes if node.id != lost])
    fresh = make_plan(asked, asked.spec(), left)
    after = make_plan(asked, asked.spec(), left, previous=before)
    spare = (set(after.nodes) - set(before.nodes)).pop()
    assert {move.target for move in after.moves} == {f"{spare}:cpu0"}
    assert len(moves_between(before, fresh)[0]) > len(after.moves)
    assert after.predicted.step_time_s["total"] <= 1.01 * fresh.predicted.step_time_s["total"]


@pytest.mark.slow
def test_moves_bring_every_device_what_it_lacks(topology, run):
    asked, whole = run(rows=24, dims={"layers": 12}), topology([1.0, 0.5, 1.0, 0.7])
    before = make_plan(asked, asked.spec(), whole)
    left = whole.only([node.id for node in whole.nodes][1:])
    after = make_plan(asked, asked.spec(), left, previous=before)
    had, has = holders(before), holders(after)
    got = {place: set(had.get(place, ())) for place in has}
    for move in after.moves:
        assert move.source in has, "nobody who is gone sends anything"
        assert set(range(*move.layers)) <= had[move.source]
        got[move.target] |= set(range(*move.layers))
    missing = {block for place in has for block in has[place] - got[place]}
    told = [note for note in after.notes if note.startswith("No device that is left holds blocks")]
    assert bool(missing) == bool(told)


def test_a_lost_stage_without_a_copy_comes_from_a_checkpoint(topology, run):
    pipeline = {"mode": "fixed", "pp": 2, "dp": 1, "schedule": "1f1b"}
    asked, whole = run(parallel=pipeline), topology([1.0] * 3)
    before = make_plan(asked, asked.spec(), whole)
    lost = before.replicas[0].devices[1][0].node
    left = whole.only([node.id for node in whole.nodes if node.id != lost])
    after = make_plan(asked, asked.spec(), left, previous=before)
    assert after.moves == []
    assert any("their state comes from a checkpoint" in note for note in after.notes)


@pytest.mark.slow
def test_the_same_plan_moves_nothing(topology, run):
    asked, made = run(), topology([1.0, 0.5])
    before = make_plan(asked, asked.spec(), made)
    assert make_plan(asked, asked.spec(), made, previous=before).moves == []


@pytest.mark.parametrize("lost", [0, 3, 5])
def test_devices_keep_their_rank_and_those_of_broken_replicas_fill_the_holes(topology, run, lost):
    pipelines = {"mode": "fixed", "pp": 2, "dp": 4, "schedule": "1f1b"}
    asked, whole = run(parallel=pipelines), topology([1.0] * 8)
    before = make_plan(asked, asked.spec(), whole)
    left = whole.only([node.id for node in whole.nodes if node.id != f"local{lost}"])
    units = make_tensor_parallel_groups(make_device_pool(asked, left), 1)
    placement = surviving_placement(units, before, 3)
    held = {place: rank for row in before.replicas for rank, places in enumerate(row.devices) for place in places}
    ranks = [(unit.device_ids[0], rank) for row in placement for rank, unit in enumerate(row)]
    assert len(dict(ranks)) == 6, "no device twice"
    assert all(held[place] == rank for place, rank in ranks)
    # With a spare device, all replicas stay, and it alone takes another rank's place.
    spare = topology([1.0] * 9).only([f"local{number}" for number in range(9) if number != lost])
    placement = surviving_placement(make_tensor_parallel_groups(make_device_pool(asked, spare), 1), before, 4)
    moved = [
        unit.device_ids[0] for row in placement for rank, unit in enumerate(row) if held.get(unit.device_ids[0]) != rank
    ]
    assert moved == ["local8:cpu0"]


def test_what_is_left_of_a_plan_goes_on_where_nothing_is_much_faster(topology, run):
    asked, whole = run(rows=60, dims={"layers": 8}, parallel=PIPELINES | {"dp": 3}), topology([1.0] * 12)
    before = make_plan(asked, asked.spec(), whole)
    left = whole.only([node.id for node in whole.nodes][:-1])
    free = run(rows=60, dims={"layers": 8})
    fresh = make_plan(free, free.spec(), left)
    after = make_plan(free, free.spec(), left, previous=before)
    assert after.predicted.step_time_s["total"] <= 1.01 * fresh.predicted.step_time_s["total"]
    assert after.predicted.bound_s <= fresh.predicted.step_time_s["total"]
    assert len(after.moves) <= len(moves_between(before, fresh)[0])


def test_a_plan_that_left_the_lost_node_idle_is_among_those_of_the_warm_start(topology, run):
    parallel = {"mode": "fixed", "pp": 2, "dp": 4, "schedule": "1f1b"}
    asked, whole = run(rows=66, parallel=parallel), topology([1.0] * 68)
    before = make_plan(asked, asked.spec(), whole, PlanRequest(neighbours=False))
    idle = next(node.id for node in whole.nodes if node.id not in before.nodes)
    left = whole.only([node.id for node in whole.nodes if node.id != idle])
    free = run(rows=66)
    space, _ = search_space_of(free, free.spec(), left, PlanRequest(), None)
    start = make_warm_start(space, before)
    devices = [[unit.device_ids for unit in row] for row in start.reused_layouts[0].placement]
    assert devices == [before.pipeline_rank_devices(replica) for replica in range(4)]


def test_a_way_of_summing_that_does_not_fit_any_more_does_not_end_the_run(topology, run):
    """On many devices the search goes by the way of summing of the plan that is replaced."""
    parallel = {"mode": "fixed", "pp": 1, "dp": 66, "schedule": "1f1b"}
    asked = run(rows=66, steps=10_000, parallel=parallel, compression={"mode": "auto", "lossy": True})
    roomy = make_plan(asked, asked.spec(), topology([1.0] * 68), PlanRequest(neighbours=False))
    assert roomy.predicted is not None
    low_rank = run(rows=66, steps=10_000, parallel=parallel, compression={"mode": "power_sgd", "warmup_steps": 100})
    before = make_plan(low_rank, asked.spec(), topology([1.0] * 68), PlanRequest(neighbours=False))
    assert after_loss(asked, topology([1.0] * 67), before) == before.ranks
    room = min(max(plan.predicted.memory_bytes.values()) for plan in (roomy, before))
    left = topology([1.0] * 67, memory=1.001 * room / 0.9)
    with pytest.raises(RefusedError, match="cannot fit"):
        make_plan(low_rank, asked.spec(), left)
    assert len(after_loss(asked, left, before)) == 66


@pytest.mark.slow
def test_messages_are_chosen_for_the_stages_that_are_left():
    """What is left of the old plan has another number of stages than the fastest plan that is found."""
    run, whole = scene_of_case(SearchCase("unlike", 16, "7B"))
    asked = run.model_copy(update={"compression": AutoCompression(mode="auto")})
    before = make_plan(asked, asked.spec(), whole, PlanRequest(neighbours=False))
    after = make_plan(asked, asked.spec(), whole.only(["node0"]), PlanRequest(neighbours=False), previous=before)
    assert len(after.nodes) == 1


def after_loss(asked, left, before):
    return make_plan(asked, asked.spec(), left, PlanRequest(neighbours=False), previous=before).ranks


def test_a_plan_of_another_model_is_not_replaced(topology, run):
    before = make_plan(run(dims={"layers": 8}), run(dims={"layers": 8}).spec(), topology())
    asked = run(dims={"layers": 4})
    with pytest.raises(InputError, match="previous plan: found 8 blocks, the run's model has 4"):
        make_plan(asked, asked.spec(), topology(), previous=before)
