"""Real processes killed for real: the run goes on, and the model is the one an undisturbed run gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from train_site import (
    HELD,
    Gate,
    Outcome,
    Site,
    node_process,
    once_there,
    processes_of,
    wait_for,
    wait_for_step,
    worker_of,
)

from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import last_row_of_each_step, read_metrics
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import read_run

pytestmark = pytest.mark.slow


def finish(process, folder: Path) -> Outcome:  # type: ignore[no-untyped-def]
    said, _ = process.communicate(timeout=800)
    return Outcome(process.returncode, folder, said)


@pytest.fixture(scope="module")
def worker_killed(site: Site) -> Outcome:
    """Four nodes by a hand-edited plan; a worker is killed after the first checkpoint and before the second."""
    known = set((site.path / "runs").glob("*"))
    gate = Gate(site.path / "gate of worker_killed", 12)
    process = site.start(
        "train", "run.yaml", "--local", "4", "--topology", "four.json", "--plan", "plan4.json",
        "--set", "recovery.memory=off", env=gate.env,
    )  # fmt: skip
    folder = site.run_folder(known)
    worker = once_there(worker_of, folder, "local1")
    wait_for_step(folder, 10)
    wait_for(lambda: bool(published.listed(folder / "checkpoints")), 60, "the first checkpoint")
    worker.kill()
    gate.open()
    return finish(process, folder)


def test_a_killed_worker_costs_a_generation_and_no_step(worker_killed: Outcome, undisturbed: Outcome) -> None:
    assert worker_killed.code == 0, worker_killed.said
    rows = worker_killed.rows
    assert {row.generation for row in rows} == {0, 1}
    assert [row.step for row in last_row_of_each_step(rows)] == list(range(1, 25))
    assert worker_killed.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)
    # The steps after the checkpoint were done twice, on the same samples.
    again = {row.step: row.loss for row in rows if row.generation == 1}
    twice = [row for row in rows if row.generation == 0 and row.step in again]
    assert twice
    assert all(row.loss == pytest.approx(again[row.step], abs=1e-5) for row in twice)
    kinds = [event.kind for event in worker_killed.events]
    assert kinds.count("generation_started") == 2
    assert "recovered" in kinds
    assert kinds[-1] == "finished"
    died = next(event for event in worker_killed.events if event.kind == "worker_died")
    assert died.data["node"] == "local1"
    assert died.data["signal"] == signal.SIGKILL
    second = [event for event in worker_killed.events if event.kind == "generation_started"][1]
    assert second.data["restore"] == "checkpoints/step-00000008"
    assert not any(event.kind in ("node_lost", "replanned") for event in worker_killed.events)


def test_validation_is_the_same_whatever_the_plan(worker_killed: Outcome, undisturbed: Outcome) -> None:
    there = {row.step: row.valid_loss for row in last_row_of_each_step(undisturbed.rows) if row.valid_loss is not None}
    here = {row.step: row.valid_loss for row in last_row_of_each_step(worker_killed.rows) if row.valid_loss is not None}
    assert set(here) == {12, 24}
    assert here == {step: pytest.approx(loss, abs=1e-4) for step, loss in there.items()}


def test_the_job_obeys_the_plan_to_the_letter(worker_killed: Outcome) -> None:
    row = worker_killed.rows[0]
    assert row.placement is not None
    found = {p.device: (p.rank, p.stages, p.layers, p.micro_batch, p.micro_batches) for p in row.placement}
    assert found == {
        "local2:cpu0": (0, [1], [3], 1, 2),
        "local3:cpu0": (1, [0], [0, 1, 2], 2, 3),
        "local0:cpu0": (2, [1], [3], 2, 3),
        "local1:cpu0": (3, [0], [0, 1, 2], 1, 2),
    }
    assert all(r.micro_batches == [3, 2] for r in worker_killed.rows)
    assert all(len(r.stage_time_s) == 2 and min(r.stage_time_s) > 0 for r in worker_killed.rows)


def test_bytes_are_those_that_the_plan_sends(worker_killed: Outcome) -> None:
    """pp: activations [8, 64, 64] fp32 forth and their gradients back; dp: 2·(n−1)·gradient over two replicas."""
    row = worker_killed.rows[3]
    assert row.bytes_sent.pp == 2 * 8 * 64 * 64 * 4
    parameters = 257 * 64 * 2 + 64 + 4 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64)
    assert row.bytes_sent.dp == pytest.approx(2 * parameters * 4, rel=1e-4)
    assert row.bytes_sent.tp == 0


def test_going_on_elsewhere_skips_a_truncated_checkpoint(worker_killed: Outcome, site: Site) -> None:
    """Resumed on two nodes: the damaged newest checkpoint is passed over, the one before it is used."""
    folder = worker_killed.folder
    assert folder is not None
    newest = published.listed(folder / "checkpoints")[-1]
    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    resumed = site.train("--resume", folder.name, "--local", "2", "--set", "steps=28")
    assert resumed.code == 0, resumed.said
    skipped = [event for event in resumed.events if event.kind == "checkpoint_skipped"]
    assert "step-00000024" in skipped[0].reason
    assert "were written" in skipped[0].reason
    start = [event for event in resumed.events if event.kind == "generation_started"][-1]
    assert start.data["restore"] == "checkpoints/step-00000016"
    assert start.generation == 2
    rows = resumed.rows
    assert [row.step for row in last_row_of_each_step(rows)] == list(range(1, 29))
    before = {row.step: row.loss for row in rows if row.generation == 1}
    after = {row.step: row.loss for row in rows if row.generation == 2}
    assert all(after[step] == pytest.approx(before[step], abs=1e-4) for step in range(17, 25))
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [(a["attempt"], a["nodes"]) for a in attempts] == [
        (0, ["local0", "local1", "local2", "local3"]), (1, ["local0", "local1"]),
    ]  # fmt: skip
    assert all(a["end"] > a["start"] and a["reason"] for a in attempts)


def test_a_run_that_lost_its_checkpoints_begins_again_only_when_asked(site: Site, tmp_path: Path) -> None:
    short = ("--set", "steps=4", "--set", "checkpoint.every=2")
    first = site.train("run.yaml", "--local", "1", "--topology", "one.json", *short)
    assert first.folder is not None, first.said
    shutil.move(first.folder / "checkpoints", tmp_path / "elsewhere")
    refused = site.command("train", "--resume", first.folder.name, "--set", "steps=6")
    assert refused.returncode == 4
    assert "all checkpoints are lost: step 4 was saved, and none is there now" in refused.stderr
    again = site.train("--resume", first.folder.name, "--from-seed", "--set", "steps=6")
    assert again.code == 0, again.said
    assert [row.step for row in again.rows if row.generation == 1] == list(range(1, 7))


def test_losing_the_first_node_means_a_new_plan_for_the_rest(site: Site, undisturbed: Outcome, tmp_path: Path) -> None:
    known = set((site.path / "runs").glob("*"))
    gate = Gate(tmp_path / "gate", 4)
    words = ("train", "run.yaml", "--local", "4", "--topology", "four.json", "--plan", "plan4.json")
    process = site.start(*words, env=gate.env)
    folder = site.run_folder(known)
    node = once_there(node_process, folder, "local0")
    wait_for_step(folder, 2)
    workers = node.children()
    node.kill()
    gate.open()
    outcome = finish(process, folder)
    assert outcome.code == 0, outcome.said
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    assert [event.data["node"] for event in outcome.events if event.kind == "node_lost"] == ["local0"]
    assert any(event.kind == "replanned" for event in outcome.events)
    plan = Plan.read(folder / "plan-1.json")
    assert "local0" not in plan.nodes
    placed = next(row.placement for row in outcome.rows if row.generation == 1)
    assert placed is not None
    assert {item.device for item in placed} == set(plan.ranks)
    assert [row.step for row in last_row_of_each_step(outcome.rows)] == list(range(1, 25))
    assert outcome.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)


def test_a_stopped_run_saves_first_and_its_folder_is_not_for_two(site: Site, undisturbed: Outcome) -> None:
    known = set((site.path / "runs").glob("*"))
    process = site.start("train", "run.yaml", "--local", "1", "--topology", "one.json", "--set", "steps=1000000")
    folder = site.run_folder(known)
    wait_for_step(folder, 3)
    second = site.command("train", "--resume", str(folder))
    assert second.returncode == 2
    assert "the run folder is in use" in second.stderr
    process.send_signal(signal.SIGINT)
    outcome = finish(process, folder)
    assert outcome.code == 1, outcome.said
    assert "stopped on request; the newest checkpoint is that of step" in outcome.said
    assert "go on with `hpctrain train --resume" in outcome.said
    last = read_metrics(folder / "metrics.jsonl")[-1].step
    found, _ = published.newest(folder / "checkpoints")
    assert found is not None
    assert found.manifest.step == last


def test_a_hung_worker_is_ended_by_the_watchdog(site: Site, tmp_path: Path) -> None:
    known = set((site.path / "runs").glob("*"))
    gate = Gate(tmp_path / "gate", 4)
    process = site.start(
        "train", "run.yaml", "--local", "2", "--topology", "four.json",
        "--set", "recovery.progress_timeout_s=30", env=gate.env,  # room for a start on a busy machine
    )  # fmt: skip
    folder = site.run_folder(known)
    hung = once_there(worker_of, folder, "local0")
    wait_for_step(folder, 2)
    hung.send_signal(signal.SIGSTOP)
    gate.open()
    outcome = finish(process, folder)
    assert outcome.code == 0, outcome.said
    assert not psutil.pid_exists(hung.pid)
    reasons = [event.reason for event in outcome.events if event.kind == "generation_started"]
    assert any("no step for 30 s" in reason for reason in reasons)
    # Each node's agent may see it first, and both may have seen it before one hears of the other.
    told = [event for event in outcome.events if event.kind == "worker_hung"]
    assert 1 <= len(told) <= 2
    step = max(row.step for row in outcome.rows if row.generation == 0) + 1
    by_rank = Plan.read(folder / "plan.json").ranks
    rank = by_rank.index("local0:cpu0")
    # The signal may come when the step's numbers are exchanged and its row is not written, or the other way round.
    stopped = rf"rank {rank} \(local0:cpu0\) is stopped by a signal in step ({step - 1}|{step}): "
    waits = rf"; rank {1 - rank} waits in step ({step}|{step + 1}): (recv|all-reduce|all-gather|send) "
    assert re.search(stopped, told[0].reason), told[0].reason
    assert re.search(waits, told[0].reason), told[0].reason
    assert told[0].data["hung"][0][0] == rank
    assert told[0].reason.rstrip(".") in outcome.said


def test_a_killed_supervisor_takes_everything_along(site: Site) -> None:
    known = set((site.path / "runs").glob("*"))
    process = site.start("train", "run.yaml", "--local", "2", "--topology", "four.json", "--set", "steps=1000000")
    folder = site.run_folder(known)
    wait_for_step(folder, 2)
    agents = [node_process(folder, node) for node in ("local0", "local1")]
    family = agents + [child for agent in agents for child in agent.children(recursive=True)]
    process.kill()
    process.communicate(timeout=600)
    wait_for(lambda: not any(p.is_running() for p in family), 60, "every process of the run has ended")
    assert published.newest(folder / "checkpoints")[0] is not None


def test_a_supervisor_killed_in_its_first_moment_leaves_nothing_either(site: Site) -> None:
    known = set((site.path / "runs").glob("*"))
    process = site.start("train", "run.yaml", "--local", "2", "--topology", "four.json", "--set", "steps=1000000")
    folder = site.run_folder(known)
    process.kill()
    process.communicate(timeout=600)
    wait_for(lambda: not processes_of(folder), 60, "every process of the run has ended")


def test_the_plan_in_the_run_folder_may_be_edited_for_the_next_attempt(site: Site) -> None:
    fixed = "parallel={mode: fixed, micro_batch: 8}"
    first = site.train("run.yaml", "--local", "1", "--topology", "one.json", "--set", "steps=2", "--set", fixed)
    assert first.code == 0, first.said
    assert first.folder is not None
    path = first.folder / "plan.json"
    plan = json.loads(path.read_text())
    plan["replicas"][0].update(micro_batch=2, micro_batches=4)
    path.write_text(json.dumps(plan))
    second = site.train("--resume", str(first.folder), "--set", "steps=3")
    assert second.code == 0, second.said
    assert [row.micro_batches for row in second.rows] == [[1], [1], [4]]
    planned = [event for event in second.events if event.kind == "planned"][-1]
    assert "was made for them" in planned.reason  # the table no longer covered the micro-batches
    assert read_run(first.folder / "run-1.yaml").steps == 2
    assert [change.at for change in read_run(first.folder / "run.yaml").optimizer.steps_changed] == [2]
    before = {path: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    dry = site.command("train", "--resume", str(first.folder), "--set", "steps=9", "--set", "compile=true", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert [line for line in dry.stdout.splitlines() if "change" in line] == [
        "  change    steps: 3 -> 9",
        "  change    compile: False -> True",
        "  change    the settings of before are kept as run-2.yaml",
        "  change    plan.json is put aside; another plan is made",
    ]
    for override, reason in (
        ("batch.global=6", "the checkpoint counts samples in batches of this size"),
        ("model={dims: {layers: 2, dim: 64, heads: 4}}", "the checkpoint holds this model's weights"),
        ("seed=4", "it decides the weights"),
        ("data.seq_len=32", "how far this data was read"),
        ("precision=bf16", "what this precision needs"),
        ("steps=2", "the newest checkpoint is of step 3; ask for more steps"),
    ):
        other = site.command("train", "--resume", str(first.folder), "--set", override)
        assert other.returncode == 2
        assert reason in other.stderr
    assert {path: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before


def test_tensor_parallel_across_nodes_counts_its_bytes(site: Site, undisturbed: Outcome) -> None:
    """Two all-reduces of [rows, seq, dim] a block in each direction; the vocabulary of 257 is not split over two."""
    fixed = "parallel={mode: fixed, tp: 2, micro_batch: 4}"
    done = site.train("run.yaml", "--local", "2", "--topology", "four.json", "--set", fixed, "--set", "precision=fp32")
    assert done.code == 0, done.said
    assert done.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)
    activation = 8 * 64 * 64 * 4
    # A ring all-reduce over two ranks sends the whole buffer once from each.
    assert done.rows[0].bytes_sent.tp == 4 * 4 * activation * 2
    assert {row.bytes_sent.tp for row in done.rows} == {4 * 4 * activation * 2}
    assert done.rows[0].bytes_sent.dp == done.rows[0].bytes_sent.pp == 0


def test_bf16_trains_nearly_as_well(site: Site, undisturbed: Outcome) -> None:
    fixed = "parallel={mode: fixed, pp: 2, micro_batch: 4}"
    done = site.train("run.yaml", "--local", "2", "--topology", "four.json", "--set", fixed, "--set", "precision=bf16")
    assert done.code == 0, done.said
    assert done.losses() == pytest.approx(undisturbed.losses(), abs=0.05)
    assert done.losses() != pytest.approx(undisturbed.losses(), abs=1e-6)


SLOW_PROPOSER = """
import os, sys
if "hpctrain.node" in " ".join(sys.orig_argv):
    import time
    from hpctrain.checkpoint import published
    quick = published.last_verified
    def slow(*arguments, **further):
        time.sleep(7)  # longer than the heartbeat timeout
        return quick(*arguments, **further)
    published.last_verified = slow
"""


def test_a_proposer_that_reads_for_long_is_not_taken_for_lost(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_PROPOSER)
    known = set((site.path / "runs").glob("*"))
    gate = Gate(tmp_path / "gate", 4)
    env = {**gate.env, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HELD)])}
    process = site.start("train", "run.yaml", "--local", "3", "--topology", "four.json", env=env)
    folder = site.run_folder(known)
    worker = once_there(worker_of, folder, "local1")
    wait_for_step(folder, 2)
    worker.kill()
    gate.open()
    outcome = finish(process, folder)
    assert outcome.code == 0, outcome.said
    kinds = [event.kind for event in outcome.events]
    assert kinds.count("generation_started") == 2
    assert "node_lost" not in kinds
    assert "replanned" not in kinds


def test_a_damaged_later_checkpoint_costs_none_of_the_new_ones(site: Site) -> None:
    """keep is 1, and the only checkpoint is damaged: those of the resumed run, of earlier steps, must stay."""
    less = ("--set", "checkpoint.keep=1", "--set", "validation.batches=0")
    first = site.train("run.yaml", "--local", "1", "--topology", "one.json", "--set", "steps=6", *less)
    assert first.folder is not None
    damaged = published.listed(first.folder / "checkpoints")[-1]
    shard = next(damaged.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    shorter = ("--set", "steps=4", "--set", "checkpoint.every=2")
    second = site.train("--resume", str(first.folder), "--from-seed", *shorter)
    assert second.code == 0, second.said
    assert [path.name for path in published.listed(first.folder / "checkpoints")] == ["step-00000004"]
    assert (first.folder / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert (first.folder / "checkpoints" / "skipped-step-00000006").is_dir()
