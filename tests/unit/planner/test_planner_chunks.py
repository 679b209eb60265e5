"""Schedules with several stages a rank: what they keep, and how their blocks are shared out."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.cost.live_micro_batches import live_micro_batches
from hpctrain.planner.cost.workload import FEWEST_ACTIVATIONS, SCHEDULE_SPECS
from hpctrain.schedule.generate import V_SHAPED_SCHEDULES, why_no_schedule


@pytest.mark.parametrize(
    "schedule_spec",
    [schedule_spec for schedule_spec in SCHEDULE_SPECS if schedule_spec.name not in V_SHAPED_SCHEDULES],
    ids=str,
)
def test_no_stage_keeps_fewer_micro_batches_than_with_1f1b(schedule_spec):
    looked_at = 0
    for pp, count in itertools.product(range(2, 7), range(1, 20)):
        stages = pp * schedule_spec.virtual_stages
        if why_no_schedule(schedule_spec.name, pp, stages, count):
            continue
        least = live_micro_batches(FEWEST_ACTIVATIONS.name, pp, pp, count)
        for rank, moments in enumerate(live_micro_batches(schedule_spec.name, pp, stages, count)):
            ((fewest,),) = least[rank]
            assert any(min(moment) >= fewest for moment in moments), (pp, count, rank, moments)
            looked_at += 1
    assert looked_at


def test_stages_of_a_rank_hold_unlike_numbers_of_blocks_where_that_is_faster(topology, run):
    by_hand = {"mode": "fixed", "pp": 2, "dp": 1, "tp": 1, "schedule": "interleaved_1f1b", "micro_batch": 1}
    asked = run(rows=2, seq_len=512, dims={"layers": 12, "dim": 512, "heads": 8}, parallel=by_hand)
    made = make_plan(asked, asked.spec(), topology([1.0, 0.5]))
    first, second, third, fourth = (stage.layers[1] - stage.layers[0] for stage in made.stages)
    assert first != third
    assert second != fourth
    # With equal stages it is 8 %.
    exact = make_plan(asked, asked.spec(), topology([1.0, 0.5]), PlanRequest(solver="exact"))
    best = exact.predicted.step_time_s["total"]
    assert made.predicted.step_time_s["total"] == pytest.approx(best, rel=0.01)
