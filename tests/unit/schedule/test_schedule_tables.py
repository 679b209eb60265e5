"""Tables of the named schedules, and the check that finds every way to break one."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.plan.plan import ScheduleName
from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.schedule.generate import SCHEDULE_NAMES, make_schedule, stage_ranks, why_no_schedule
from hpctrain.schedule.resolve import check_schedule

CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved_1f1b": [2, 3], "interleaved_zero_bubble": [1, 2, 3], "zbv": [2]}
"""Stages a rank for which each named schedule is defined."""
named = st.sampled_from(SCHEDULE_NAMES).flatmap(
    lambda name: st.tuples(st.just(name), st.integers(1, 6), st.sampled_from(CHUNKS[name]), st.integers(1, 13))
)


def table_of(name, pp, chunks, micro_batches):
    return make_schedule(name, pp, pp * chunks, micro_batches), pp * chunks


def live_peaks(table):
    peaks = []
    for row in table.ranks:
        live, peak = 0, 0
        for action in row:
            live += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


@given(named)
def test_every_named_table_is_whole_and_can_be_executed(case):
    table, stages = table_of(*case)
    check_schedule(table, stages, case[3])
    assert table.owner() == dict(enumerate(stage_ranks(case[0], case[1], stages)))
    assert Schedule.parse(table.rows()) == table


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_keeps_no_more_micro_batches_than_there_are_ranks_behind(pp, micro_batches):
    table = make_schedule("1f1b", pp, pp, micro_batches)
    assert live_peaks(table) == [min(micro_batches, pp - rank) for rank in range(pp)]
    assert live_peaks(make_schedule("gpipe", pp, pp, micro_batches)) == [micro_batches] * pp


def test_1f1b_with_fewer_micro_batches_than_ranks():
    rows = make_schedule("1f1b", 3, 3, 2).rows()
    assert rows == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]


@given(st.integers(1, 6), st.integers(1, 20))
def test_a_v_keeps_as_much_as_the_first_rank_of_1f1b(pp, micro_batches):
    """Qi et al. 2024, section 6: 2·pp half stages are kept at most, on every rank."""
    assert max(live_peaks(make_schedule("zbv", pp, 2 * pp, micro_batches))) <= 2 * pp


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 13))
def test_weights_wait_for_no_more_backwards_than_the_rank_has_before_it(pp, chunks, micro_batches):
    for rank, row in enumerate(make_schedule("interleaved_zero_bubble", pp, pp * chunks, micro_batches).ranks):
        behind, most = 0, 0
        for action in row:
            behind += {"I": 1, "W": -1}.get(action.kind, 0)
            most = max(most, behind)
        assert most == min(rank + 1, chunks * micro_batches)


def test_a_v_goes_down_and_back():
    assert stage_ranks("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert stage_ranks("interleaved_zero_bubble", 3, 6) == (0, 1, 2, 0, 1, 2)


def test_every_name_of_a_plan_has_a_table_and_the_other_way_round():
    assert {*get_args(ScheduleName)} == {*SCHEDULE_NAMES, "custom"}
    assert {name for name in SCHEDULE_NAMES if why_no_schedule(name, 2, 4, 3) is None} == {
        "interleaved_1f1b", "interleaved_zero_bubble", "zbv"
    }  # fmt: skip


@given(named, st.data())
def test_a_missing_action_is_found(case, data):
    table, stages = table_of(*case)
    rows = [list(row) for row in table.ranks]
    rank = data.draw(st.integers(0, len(rows) - 1))
    gone = rows[rank].pop(data.draw(st.integers(0, len(rows[rank]) - 1)))
    with pytest.raises(ValueError, match=f"micro-batch {gone.micro_batch}|{gone} is missing"):
        check_schedule(Schedule(tuple(map(tuple, rows))), stages, case[3])


@given(named, st.data())
def test_a_doubled_action_is_found(case, data):
    table, stages = table_of(*case)
    rows = [list(row) for row in table.ranks]
    rank = data.draw(st.integers(0, len(rows) - 1))
    again = data.draw(st.sampled_from(rows[rank]))
    rows[rank].append(again)
    with pytest.raises(ValueError, match=f"{again} stands 2 times"):
        check_schedule(Schedule(tuple(map(tuple, rows))), stages, case[3])


@given(named, st.data())
def test_a_backward_before_its_forward_is_found(case, data):
    table, stages = table_of(*case)
    rows = [list(row) for row in table.ranks]
    rank = data.draw(st.integers(0, len(rows) - 1))
    action = data.draw(st.sampled_from([action for action in rows[rank] if action.kind in "BI"]))
    rows[rank].remove(action)
    rows[rank].insert(rows[rank].index(Action(action.stage, "F", action.micro_batch)), action)
    with pytest.raises(ValueError, match="cannot be executed"):
        check_schedule(Schedule(tuple(map(tuple, rows))), stages, case[3])


@pytest.mark.parametrize(
    ("rows", "micro_batches", "message"),
    [
        ([["0F0", "0B0", "1F0"], ["1B0"]], 1, "stage 1 lies on rank 0"),
        ([["0F0", "0B0", "0F1"], ["1F0", "1B0", "1F1", "1B1"]], 2, "stage 0, micro-batch 1: found none"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], 1, "found 0I0, allowed: B, or both I and W"),
        ([["0F0", "0B0"], ["1F0", "1B0", "2F0"]], 1, "there are stages 0 to 1"),
        ([["0F0", "0B0", "0F2"], ["1F0", "1B0"]], 2, "there are micro-batches 0 to 1"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], 2, "waits for 1B0"),
    ],
)
def test_a_broken_table_is_told_in_one_line(rows, micro_batches, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_schedule(Schedule.parse(rows), 2, micro_batches)
    assert "\n" not in str(caught.value)


def test_split_backward_passes_the_check():
    first, second = "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W1 1W0"
    check_schedule(Schedule.parse([first.split(), second.split()]), 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2, 4), "found 'zigzag', allowed: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv"),
        (("1f1b", 2, 4, 4), "one stage a rank"),
        (("interleaved_1f1b", 2, 2, 4), "at least two stages a rank"),
        (
            ("interleaved_zero_bubble", 2, 3, 4),
            "found 3 stages on 2 pipeline ranks, allowed: at least one stage a rank",
        ),
        (("zbv", 2, 6, 4), "schedule zbv: found 6 stages on 2 pipeline ranks, allowed: two stages a rank"),
        (("1f1b", 2, 2, 0), "start at 1"),
    ],
)
def test_what_is_not_defined_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)
