"""Which table a replica runs."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.resolve import schedule_of


def plan_of(schedule="1f1b", micro_batches=4, **fields):
    devices = [["local0:cpu0"], ["local1:cpu0"]]
    replica = Replica(sequences=2 * micro_batches, micro_batch=2, micro_batches=micro_batches, devices=devices)
    return Plan(
        pp=2, dp=1, tp=1, schedule=schedule, stages=[Stage(layers=(0, 3)), Stage(layers=(3, 4))], replicas=[replica],
        ranks=["local0:cpu0", "local1:cpu0"], **fields,
    )  # fmt: skip


def rows_of(name, micro_batches):
    return {0: dict(enumerate(make_schedule(name, 2, 2, micro_batches).rows()))}


def test_a_whole_table_is_obeyed_whatever_the_name_says():
    table, note = schedule_of(plan_of("1f1b", actions=rows_of("gpipe", 4)), 0)
    assert table == make_schedule("gpipe", 2, 2, 4)
    assert note is None


def test_no_table_is_made_from_the_name_without_a_note():
    assert schedule_of(plan_of("gpipe"), 0) == (make_schedule("gpipe", 2, 2, 4), None)


def test_a_table_for_other_micro_batches_is_made_anew_and_said():
    table, note = schedule_of(plan_of("1f1b", micro_batches=6, actions=rows_of("1f1b", 4)), 0)
    assert table == make_schedule("1f1b", 2, 2, 6)
    assert note is not None
    assert "0F4 is missing" in note
    assert "6 micro-batches" in note


def test_a_stage_on_a_rank_without_its_devices_is_not_obeyed():
    actions = rows_of("1f1b", 4)
    actions[0] = {0: actions[0][1], 1: actions[0][0]}
    table, note = schedule_of(plan_of("1f1b", actions=actions), 0)
    assert table == make_schedule("1f1b", 2, 2, 4)
    assert "its devices are those of rank" in note


@pytest.mark.parametrize("actions", [{}, {0: {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}}], ids=["none", "short"])
def test_a_custom_table_must_be_whole(actions):
    with pytest.raises(
        InputError, match=r"plan: actions\[0\]: .*; complete the table, or name a schedule: gpipe, 1f1b, .*, zbv"
    ):
        schedule_of(plan_of("custom", actions=actions), 0)


def test_a_v_on_devices_that_stand_in_turn_is_told():
    devices = [["local0:cpu0"], ["local1:cpu0"], ["local0:cpu0"], ["local1:cpu0"]]
    looped = plan_of("zbv").model_copy(
        update={
            "stages": [Stage(layers=(i, i + 1)) for i in range(4)],
            "replicas": [Replica(sequences=8, micro_batch=2, micro_batches=4, devices=devices)],
        }
    )
    with pytest.raises(
        InputError, match=r"plan: stage 3 is on pipeline rank 0, its devices are those of rank 1; change"
    ):
        schedule_of(looped, 0)


def test_backwards_cut_by_hand_are_obeyed():
    first, second = ["0F0", "0F1", "0I0", "0W0", "0B1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    third = ["1F0", "1I0", "1F1", "1B1"]
    table, note = schedule_of(plan_of("custom", micro_batches=2, actions={0: {0: first, 1: second}}), 0)
    assert note is None
    assert table.rows() == [first, second]
    with pytest.raises(InputError, match="backward of stage 1, micro-batch 0: found 1I0, allowed: B, or both I and W"):
        schedule_of(plan_of("custom", micro_batches=2, actions={0: {0: first, 1: third}}), 0)


def test_a_named_schedule_that_is_not_defined_for_the_plan():
    with pytest.raises(InputError, match="at least two stages a rank"):
        schedule_of(plan_of("interleaved_1f1b"), 0)
