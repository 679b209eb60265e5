"""Figures that events and metrics add up to."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.report.summaries import lost_steps, recoveries, restored_step, robustness, steady_step_time


def test_a_fault_and_its_recovery_belong_together(make):
    events, _ = make.history()
    (recovery,) = recoveries(events)
    assert [fault.data["node"] for fault in recovery.faults] == ["local2"]
    assert (recovery.generation, recovery.restore_step, recovery.step, recovery.seconds) == (1, 20, 21, 6.2)
    assert recovery.done


def test_a_second_fault_before_training_goes_on_is_the_same_recovery(make):
    events = [
        make.event("worker_died", 10, node="local1"),
        make.started(11, 1, 0, ["local0"], "plan.json"),
        make.event("node_lost", 12, 1, node="local3"),
        make.started(13, 2, 0, ["local0"], "plan.json"),
        make.event("recovered", 20, 2, step=1, seconds=10.0),
    ]
    (recovery,) = recoveries(events)
    assert [fault.kind for fault in recovery.faults] == ["worker_died", "node_lost"]
    assert (recovery.generation, recovery.seconds) == (2, 10.0)


def test_a_fault_without_recovery_stays_open(make):
    first, second = recoveries([*make.history()[0][:-1], make.event("node_lost", 60, 1, node="local1")])
    assert first.done
    assert not second.done
    assert second.generation is None
    assert second.seconds is None


def test_time_of_recovery_is_counted_when_the_event_does_not_tell(make):
    events = [make.event("node_lost", 10, node="local1"), make.event("recovered", 14.5, 1, step=3)]
    assert recoveries(events)[0].seconds == pytest.approx(4.5)


def test_lost_steps_are_those_done_twice(make):
    _, rows = make.history()
    assert lost_steps(rows) == 5  # steps 21 to 25
    assert lost_steps([]) == 0


def test_robustness_is_the_papers_formula_over_the_last_thousand_steps(make):
    slow = [make.row(step, step, step_time_s=9.0) for step in range(1, 501)]
    times = [0.4, 0.6] * 500
    steady = [make.row(501 + index, 600 + index, step_time_s=time) for index, time in enumerate(times)]
    score, steps = robustness(slow + steady)
    assert steps == 1000
    assert score == pytest.approx(1 - 0.1 / 0.5)


def test_robustness_needs_two_steps(make):
    assert robustness([]) is None
    assert robustness([make.row(1, 1)]) is None


def test_robustness_counts_a_repeated_step_once(make):
    rows = [make.row(1, 1, step_time_s=50.0), make.row(1, 2, 1, 1.0), make.row(2, 3, 1, 1.0)]
    assert robustness(rows) == (1.0, 2)


@given(times=st.lists(st.floats(0.01, 100), min_size=2, max_size=50), scale=st.floats(0.1, 10))
def test_robustness_does_not_depend_on_the_unit_of_time(make, times, scale):
    rows = [make.row(step, step, step_time_s=time) for step, time in enumerate(times, 1)]
    scaled = [make.row(step, step, step_time_s=time * scale) for step, time in enumerate(times, 1)]
    assert robustness(rows)[0] == pytest.approx(robustness(scaled)[0], abs=1e-6)
    assert robustness(rows)[0] <= 1.0


def test_steady_step_time_leaves_out_the_first_step_of_each_generation(make):
    rows = [make.row(1, 1, 0, 30.0), make.row(2, 2, 0, 1.0), make.row(2, 3, 1, 40.0), make.row(3, 4, 1, 3.0)]
    assert steady_step_time(rows) == statistics.median([1.0, 3.0])
    assert steady_step_time(rows[:1]) == 30.0
    assert steady_step_time([]) is None


@pytest.mark.parametrize(
    ("data", "step"),
    [
        ({"restore": "checkpoints/step-00000050"}, 50),
        ({"restore": None}, 0),
        ({"restore_step": 7}, 7),
        ({}, 0),
    ],
)
def test_the_step_that_a_generation_goes_on_from(make, data, step):
    assert restored_step(make.event("generation_started", 1, 1, **data)) == step


def test_workers_started_again_without_a_loss_are_a_recovery_too(make):
    events = [
        make.started(0, 0, None, ["local0"], "plan.json"),
        make.event("generation_started", 5, 1, restore="checkpoints/step-00000010"),
        make.event("recovered", 8, 1, step=11, seconds=4.0),
    ]
    (recovery,) = recoveries(events)
    assert (recovery.faults, recovery.restore_step, recovery.seconds) == ((), 10, 4.0)
