"""A run whose nodes are not as fast as its topology says takes another plan by itself, and loses no step by it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from train_site import Outcome, Site, wait_for, wait_for_step

from hpctrain.base.errors import EXIT_FAILED
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.plan.plan import Plan

pytestmark = pytest.mark.slow

STEPS = 2000
"""So many that another plan is worth its price; the runs are stopped long before."""
SETTINGS = (
    "--local", "3", "--topology", "four.json", "--set", f"steps={STEPS}", "--set", "batch.global=12",
    "--set", "parallel={mode: fixed, dp: 3, micro_batch: 1}", "--set", "checkpoint.every=10000",
    "--set", "validation.every=10000",
)  # fmt: skip
ADAPTING = ("--set", "adapt={mode: online, after: 20}")
FORWARD_S = {"local0": 0.02, "local1": 0.02, "local2": 0.1}


def stopped(site: Site, arguments: Sequence[str], until: Callable[[Path], None]) -> Outcome:
    """The run, which is asked to stop after `until` has come back."""
    known = set((site.path / "runs").glob("*"))
    paths = [str(Path(__file__).with_name("unequal_nodes")), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FORWARD_S": json.dumps(FORWARD_S)}
    process = site.start("train", "run.yaml", *SETTINGS, *arguments, env=env)
    try:
        folder = site.run_folder(known)
        until(folder)
        process.terminate()
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return Outcome(process.returncode, folder, said)


def wait_for_event(folder: Path, kind: str) -> None:
    wait_for(lambda: any(event.kind == kind for event in read_events(folder / "events.jsonl")), 240, kind)


def of_kind(outcome: Outcome, kind: str) -> list[Event]:
    return [event for event in outcome.events if event.kind == kind]


def test_a_slow_node_gets_less_work_and_no_step_is_lost(site: Site) -> None:
    outcome = stopped(site, ADAPTING, lambda folder: wait_for_event(folder, "adaptation_measured"))
    assert outcome.code == EXIT_FAILED, outcome.said
    assert outcome.folder is not None
    adapted = of_kind(outcome, "adapted")[0]
    assert adapted.reason.startswith("local2:cpu0 computes"), adapted.reason
    assert adapted.data["predicted_step_time_s"] < adapted.data["measured_step_time_s"]
    plan = Plan.read(outcome.folder / adapted.data["plan"])
    shares = {replica.devices[0][0].node: replica.sequences for replica in plan.replicas}
    # The other two are rarely equally fast on a busy machine, so they may have unequal shares.
    assert shares["local2"] < min(4, shares["local0"], shares["local1"])
    start = of_kind(outcome, "generation_started")[1]
    assert (start.reason, start.data["lost_steps"], start.data["memory"]["in_place"]) == (adapted.reason, 0, True)
    assert not [event for event in outcome.events if event.kind in ("worker_died", "recovered", "replanned")]

    judged = of_kind(outcome, "adaptation_measured")[0]
    assert judged.generation == 1
    measured_s = judged.data["measured_step_time_s"]  # None if other work changed the speed of a device meanwhile
    # Where other work takes what the plan gains, the run rightly goes back.
    gains = measured_s is None or measured_s < adapted.data["measured_step_time_s"]
    assert judged.data["kept"] == gains, judged

    rows = outcome.rows
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))  # none is made twice
    changed = max(row.step for row in rows if row.generation == 0)
    alone = stopped(site, (), lambda folder: wait_for_step(folder, changed + 10))
    assert not of_kind(alone, "adapted")
    common = min(len(rows), len(alone.rows))
    assert {row.generation for row in rows[:common]} == {0, 1}
    assert [row.loss for row in rows[:common]] == pytest.approx([row.loss for row in alone.rows[:common]], abs=1e-3)


def test_without_state_in_memory_the_other_plan_starts_from_a_checkpoint_of_the_same_step(site: Site) -> None:
    off = (*ADAPTING, "--set", "recovery.memory=off")
    outcome = stopped(site, off, lambda folder: wait_for_step(folder, 0, generation=1))
    assert outcome.code == EXIT_FAILED, outcome.said
    start = of_kind(outcome, "generation_started")[1]
    assert "memory" not in start.data
    last = max(row.step for row in outcome.rows if row.generation == 0)
    assert start.data["restore"] == f"checkpoints/step-{last:08}"
    assert [row.step for row in outcome.rows] == list(range(1, len(outcome.rows) + 1))
