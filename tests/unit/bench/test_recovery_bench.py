"""What a fault cost a job, from the steps that the job wrote, and the rows that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import InputError
from hpctrain.bench.recovery.lab_faults import (
    CASES,
    FaultSample,
    as_json,
    cost_of,
    loss_difference,
    row_of,
    usual_step_s,
    victim_of,
)
from hpctrain.bench.recovery.lab_jobs import BYTES_PER_PARAMETER, TrainedStep, TrainingSettings, spec_of
from hpctrain.bench.recovery.lab_recovery import RecoverySettings, summary
from hpctrain.cli.main import cli

SAMPLE = FaultSample("worker_killed", "hpctrain", 0, "node0", step_s=0.5)


def steps(life: int, first: int, ends: list[float], loss: float = 1.0) -> list[TrainedStep]:
    """The steps of one start of the workers, from `first` on; the first of them takes longer."""
    return [
        TrainedStep(first + index, life, end, 0.5 if index else 3.0, loss + index) for index, end in enumerate(ends)
    ]


BEFORE = steps(0, 1, [10.0, 10.5, 11.0, 11.5])


def test_what_a_fault_cost_that_goes_back_to_a_checkpoint() -> None:
    after = steps(1, 3, [14.0, 14.5, 15.0])
    cost = cost_of(SAMPLE, 11.7, BEFORE, BEFORE + after)
    assert cost is not None
    # From 11.7 to the end of step 3 at 14.0, less a step; and to the end of step 5, which is the first new one.
    assert (cost.seconds, cost.caught_up_s) == (pytest.approx(1.8), pytest.approx(2.8))
    assert (cost.lost_steps, cost.redone_steps) == (2, 2)


def test_what_a_fault_cost_that_lost_no_step() -> None:
    # A step that was in the making when the fault came may have been finished, too: then its line is missing.
    for first in (5, 6):
        cost = cost_of(SAMPLE, 11.7, BEFORE, BEFORE + steps(1, first, [12.6]))
        assert cost is not None
        assert cost.seconds == cost.caught_up_s == pytest.approx(0.4)
        assert (cost.lost_steps, cost.redone_steps) == (0, 0)


def test_a_job_has_not_recovered_before_it_makes_a_new_step() -> None:
    assert cost_of(SAMPLE, 11.7, BEFORE, BEFORE) is None
    assert cost_of(SAMPLE, 11.7, BEFORE, BEFORE + steps(1, 3, [14.0, 14.5])) is None
    # A step that the old workers still finished is done, and is no recovery.
    late = [*BEFORE, TrainedStep(5, 0, 11.9, 0.5, 1.0)]
    assert cost_of(SAMPLE, 11.7, BEFORE, late) is None
    cost = cost_of(SAMPLE, 11.7, BEFORE, late + steps(1, 5, [13.0, 13.5]))
    assert cost is not None
    assert (cost.lost_steps, cost.redone_steps) == (1, 1)


def test_the_first_step_of_a_start_is_not_usual() -> None:
    assert usual_step_s([*BEFORE, *steps(1, 3, [14.0, 14.5])]) == 0.5


def test_victims() -> None:
    nodes = ("a", "b", "c")
    assert [victim_of("worker_killed", number, nodes) for number in range(4)] == ["a", "b", "c", "a"]
    assert [victim_of("node_killed", number, nodes) for number in range(4)] == ["b", "c", "b", "c"]
    assert {victim_of("node0_killed", number, nodes) for number in range(4)} == {"a"}
    assert "a" not in {victim_of("node_silent", number, nodes) for number in range(4)}


def test_losses_are_compared_where_both_runs_have_the_step() -> None:
    assert loss_difference(BEFORE, {1: 1.0, 2: 2.0}) == 0.0
    assert loss_difference(BEFORE, {2: 2.25, 9: 0.0}) == 0.25
    assert loss_difference(BEFORE, {}) is None


def test_rows_count_faults_without_a_recovery() -> None:
    times = [
        replace(SAMPLE, number=n, seconds=1.0 + n, caught_up_s=2.0, lost_steps=n, redone_steps=0) for n in range(3)
    ]
    row = row_of([*times, replace(SAMPLE, number=3, reason="all agents have ended (1)")])
    assert (row.n, row.not_recovered, row.reason) == (3, 1, "all agents have ended (1)")
    assert (row.median_s, row.p95_s) == (2.0, pytest.approx(2.9))
    assert (row.lost_steps_max, row.redone_steps_max, row.loss_difference_max) == (2, 0, None)
    alone = row_of([replace(SAMPLE, reason="gone")])
    assert (alone.n, alone.not_recovered, alone.median_s) == (0, 1, None)


def test_ratios_are_over_faults_with_the_same_number() -> None:
    settings = RecoverySettings(("worker_killed",), ("hpctrain", "requeue"), TrainingSettings(spec_of(1)))
    ours = [replace(SAMPLE, number=n, seconds=1.0, caught_up_s=1.0, lost_steps=0, redone_steps=0) for n in range(3)]
    theirs = [replace(sample, system="requeue", seconds=4.0) for sample in ours[:2]]
    lines = [{"reference": True, "losses": [1.0]}, *map(as_json, [*ours, *theirs])]
    record = summary(lines, settings)
    assert [(row["system"], row["n"]) for row in record["rows"]] == [("hpctrain", 3), ("requeue", 2)]
    (ratio,) = record["ratios"]
    assert (ratio["against"], ratio["ratio"], ratio["pairs"]) == ("requeue", 0.25, 2)


@pytest.mark.parametrize("state_bytes", [1e5, 2e6, 2e8])
def test_the_model_has_the_state_that_was_asked_for(state_bytes: float) -> None:
    assert state_bytes <= BYTES_PER_PARAMETER * spec_of(int(state_bytes)).parameters() <= 1.2 * state_bytes + 1.5e6


def test_the_command_needs_a_lab() -> None:
    done = CliRunner().invoke(cli, ["bench", "recovery"])
    assert isinstance(done.exception, InputError)
    assert "give --lab" in str(done.exception)
    assert set(CASES) == {"worker_killed", "node_killed", "node0_killed", "node_silent"}
