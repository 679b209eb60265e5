"""Tables of the named schedules, and the check that finds every way to break one."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpctrain.records.schedule import Action, Schedule
from hpctrain.schedule import check_schedule, make_schedule
from hpctrain.schedule.generate import interleaves

named = st.tuples(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 6), st.integers(2, 3), st.integers(1, 13)
)


def table_of(name, pp, chunks, micro_batches):
    stages = pp * chunks if name == "interleaved_1f1b" else pp
    assume(name != "interleaved_1f1b" or interleaves(pp, stages, micro_batches) is None)
    return make_schedule(name, pp, stages, micro_batches), stages


def live_peaks(table):
    peaks = []
    for row in table.ranks:
        live, peak = 0, 0
        for action in row:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


@given(named)
def test_every_named_table_is_whole_and_can_be_executed(case):
    table, stages = table_of(*case)
    check_schedule(table, stages, case[3])
    assert all(action.stage % case[1] == rank for rank, row in enumerate(table.ranks) for action in row)
    assert Schedule.parse(table.rows()) == table


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_keeps_no_more_micro_batches_than_there_are_ranks_behind(pp, micro_batches):
    table = make_schedule("1f1b", pp, pp, micro_batches)
    assert live_peaks(table) == [min(micro_batches, pp - rank) for rank in range(pp)]
    assert live_peaks(make_schedule("gpipe", pp, pp, micro_batches)) == [micro_batches] * pp


def test_1f1b_with_fewer_micro_batches_than_ranks():
    rows = make_schedule("1f1b", 3, 3, 2).rows()
    assert rows == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]


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
    action = data.draw(st.sampled_from([action for action in rows[rank] if action.kind == "B"]))
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
        (("zigzag", 2, 2, 4), "found 'zigzag', allowed: gpipe, 1f1b, interleaved_1f1b"),
        (("1f1b", 2, 4, 4), "one stage a rank"),
        (("interleaved_1f1b", 2, 2, 4), "at least two stages a rank"),
        (("interleaved_1f1b", 2, 4, 5), "5 micro-batches are not a multiple of its 2 rounds"),
        (("1f1b", 2, 2, 0), "start at 1"),
    ],
)
def test_what_is_not_defined_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)
