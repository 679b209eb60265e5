"""Workers and nodes killed for real, and state in memory: no step is lost, and the losses are those of a run that was
left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from test_recovery import finish
from train_site import Gate, Outcome, Site, kill_node, kill_worker, once_there, wait_for_step, worker_of

from hpctrain.records.history.run_log import Event

pytestmark = pytest.mark.slow

STEPS = 40
LONG = ("--set", f"steps={STEPS}", "--set", "checkpoint.every=1000", "--set", "validation.every=1000")
"""The only checkpoint is that of the last step."""
SHARDED = ("--local", "2", "--topology", "four.json", "--set", "parallel={mode: fixed, dp: 2, zero: 1, micro_batch: 4}")
SNAPSHOTS = (*SHARDED, "--set", "recovery.snapshot_every=1")
REPLICAS = ("--local", "2", "--topology", "four.json", "--set", "parallel={mode: fixed, dp: 2, micro_batch: 4}")
THREE = ("--local", "3", "--topology", "four.json", "--set", "parallel={mode: fixed, dp: 3, micro_batch: 1}")


def disturbed(site: Site, arguments: tuple[str, ...], fault: Callable[[Path, str], None]) -> Outcome:
    """A run of which local1, or its worker, is killed after some steps."""
    known = set((site.path / "runs").glob("*"))
    gate = Gate(site.path / f"gate {len(known)}", 12)
    process = site.start("train", "run.yaml", *LONG, *arguments, env=gate.env)
    folder = site.run_folder(known)
    once_there(worker_of, folder, "local1")
    wait_for_step(folder, 10)
    fault(folder, "local1")
    gate.open()
    return finish(process, folder)


def second_start(outcome: Outcome) -> Event:
    assert outcome.code == 0, outcome.said
    starts = [event for event in outcome.events if event.kind == "generation_started"]
    assert len(starts) == 2, outcome.said
    return starts[1]


def by_step(outcome: Outcome) -> dict[int, float]:
    """The loss of each step. Each step has one row: none is done twice, or lost."""
    assert [row.step for row in outcome.rows] == list(range(1, STEPS + 1))
    return {row.step: row.loss for row in outcome.rows}


@pytest.mark.parametrize("arguments", [REPLICAS, SNAPSHOTS], ids=["replicas", "zero1"])
def test_a_killed_worker_costs_no_step_and_changes_no_bit(arguments: tuple[str, ...], site: Site) -> None:
    alone = by_step(site.train("run.yaml", *LONG, *arguments))
    outcome = disturbed(site, arguments, kill_worker)
    start = second_start(outcome)
    assert start.data["memory"]["in_place"]
    assert start.data["lost_steps"] == 0
    assert start.data["memory"]["step"] >= 10
    assert by_step(outcome) == alone


def test_a_killed_node_costs_no_step_if_another_has_the_same_state(site: Site) -> None:
    alone = by_step(site.train("run.yaml", *LONG, *THREE))
    outcome = disturbed(site, THREE, kill_node)
    start = second_start(outcome)
    assert start.data["memory"]["in_place"]
    assert start.data["lost_steps"] == 0
    replanned = [event for event in outcome.events if event.kind == "replanned"]
    assert "on 2 nodes" in replanned[0].reason
    assert by_step(outcome) == pytest.approx(alone, abs=1e-4)


def test_a_lost_shard_means_the_checkpoint(site: Site) -> None:
    arguments = (*SHARDED, "--set", "checkpoint.every=5")
    outcome = disturbed(site, arguments, kill_node)
    start = second_start(outcome)
    assert "memory" not in start.data
    assert start.data["restore"].startswith("checkpoints/step-")
    assert "lost_steps" not in start.data


def test_without_memory_a_killed_worker_means_the_checkpoint(site: Site) -> None:
    arguments = (*SHARDED, "--set", "checkpoint.every=5", "--set", "recovery.memory=off")
    outcome = disturbed(site, arguments, kill_worker)
    assert "memory" not in second_start(outcome).data


@pytest.mark.parametrize("arguments", [REPLICAS, SHARDED], ids=["replicas", "zero1"])
@pytest.mark.parametrize("fault", [kill_worker, kill_node])
def test_with_snapshots_alone_a_fault_costs_less_than_two_intervals(
    fault: Callable[[Path, str], None], arguments: tuple[str, ...], site: Site
) -> None:
    private = ("--set", "recovery.memory=snapshots", "--set", "recovery.snapshot_every=2")
    outcome = disturbed(site, (*arguments, *private), fault)
    start = second_start(outcome)
    assert not start.data["memory"]["in_place"]
    assert start.data["lost_steps"] <= 3
    assert start.data["memory"]["step"] >= 6
    again = [row.step for row in outcome.rows if row.generation == 1]
    assert again == list(range(start.data["memory"]["step"] + 1, STEPS + 1))


def test_a_lost_shard_is_in_the_snapshot_of_the_step_before(site: Site) -> None:
    outcome = disturbed(site, SNAPSHOTS, kill_node)
    start = second_start(outcome)
    assert not start.data["memory"]["in_place"]
    assert start.data["lost_steps"] <= 1
    assert start.data["memory"]["step"] >= 9
    again = [row.step for row in outcome.rows if row.generation == 1]
    assert again == list(range(start.data["memory"]["step"] + 1, STEPS + 1))


def test_int4_residuals_of_three_replicas_go_on_in_the_fourth_one_s_absence(site: Site) -> None:
    four = ("--local", "4", "--topology", "four.json", "--set", "compression.mode=int4")
    four = (*four, "--set", "parallel={mode: fixed, dp: 4, micro_batch: 1}", "--set", "batch.global=12")
    alone = by_step(site.train("run.yaml", *LONG, *four))
    outcome = disturbed(site, four, kill_node)
    start = second_start(outcome)
    assert start.data["lost_steps"] == 0
    dropped = [event.reason for event in outcome.events if event.kind == "residuals_dropped"]
    step = start.data["memory"]["step"]
    assert dropped == [
        f"the state of step {step} in memory: nobody has what 1 of 4 ranks had not sent yet of their gradients"
    ]
    assert {row.compression is not None for row in outcome.rows} == {True}
    losses = by_step(outcome)
    before, after = range(1, step + 1), range(step + 1, STEPS + 1)
    assert [losses[number] for number in before] == [alone[number] for number in before]
    # What one rank had not sent yet is lost, so single losses differ by more, but not their mean.
    assert fmean(losses[number] for number in after) == pytest.approx(fmean(alone[number] for number in after), abs=0.1)
