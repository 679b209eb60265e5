"""What device-hours were spent on, and the notes that follow from a run's files."""

from __future__ import annotations

import json

import pytest

from hpctrain.records.history.rank_log import RankRow
from hpctrain.report.advice import RunFacts, next_time
from hpctrain.report.cost import attempt_spans
from hpctrain.report.device_hours import read_device_hours
from hpctrain.report.html.run_view import read_run_view

NODES = ["n1", "n2"]


def attempt(make, number, start, end, **more):
    times = {"start": make.start_s + start, "end": make.start_s + end}
    return {"attempt": number, "job_id": str(number), "nodes": NODES, **times, **more}


def seconds_of(device_hours):
    """Seconds by what they were spent on, of two nodes."""
    return {spent: round(hours * 3600 / len(NODES), 3) for spent, hours in device_hours.hours.items()}


def test_each_second_of_an_attempt_counts_once(make, run_folder):
    run = read_run_view(run_folder.path, make.start_s).run
    rows = [
        make.row(1, 20, step_time_s=4.0),  # 16 s warm-up
        make.row(2, 25, step_time_s=4.0),  # 1 s between the steps
        make.row(3, 29, step_time_s=4.0),  # lost: done again
        make.row(3, 40, 1, step_time_s=4.0),  # 7 s after the fault
        make.row(4, 44, 1, step_time_s=4.0),
    ]
    events = [make.event("worker_died", 30)]
    device_hours = read_device_hours(run_folder.path, run, [attempt(make, 0, 0, 50)], rows, events, None)
    assert device_hours.unit == "node-hours"
    assert seconds_of(device_hours) == {"useful": 16.0, "faults": 11.0, "waiting": 7.0, "warm_up": 16.0}
    assert device_hours.total * 3600 == pytest.approx(50 * len(NODES))
    assert device_hours.share("useful") == pytest.approx(0.32)


def test_another_generation_without_a_fault_is_a_wait(make, run_folder):
    run = read_run_view(run_folder.path, make.start_s).run
    rows = [make.row(1, 10, step_time_s=10.0), make.row(2, 30, 1, step_time_s=10.0)]
    device_hours = read_device_hours(run_folder.path, run, [attempt(make, 0, 0, 30)], rows, [], None)
    assert seconds_of(device_hours) == {"useful": 20.0, "faults": 0.0, "waiting": 10.0, "warm_up": 0.0}


@pytest.mark.parametrize(("ended", "spent"), [("infrastructure", "faults"), ("resumable", "warm_up")])
def test_an_attempt_without_a_step(make, run_folder, ended, spent):
    run = read_run_view(run_folder.path, make.start_s).run
    lines = [attempt(make, 0, 0, 60, **{"class": ended})]
    seconds = seconds_of(read_device_hours(run_folder.path, run, lines, [], [], None))
    assert seconds == {"useful": 0.0, "faults": 0.0, "waiting": 0.0, "warm_up": 0.0, spent: 60.0}


def test_a_run_without_attempts_has_no_bar(make, run_folder):
    run = read_run_view(run_folder.path, make.start_s).run
    assert read_device_hours(run_folder.path, run, [], [make.row(1, 1)], [], None) is None


def facts(make, run_folder, lines, rows=(), events=(), ranks=(), **keys):
    (run_folder.path / "run.yaml").write_text(json.dumps({**make.run, **keys}))
    run_folder.write(list(events), list(rows))
    view = read_run_view(run_folder.path, make.start_s + 1e6)
    device_hours = read_device_hours(run_folder.path, view.run, lines, view.rows, view.events, None)
    return RunFacts(view.run, view.status, view.events, attempt_spans(lines, [], None), device_hours, ranks)


def settings(facts):
    return [note.setting for note in next_time(facts)]


SLURM = {"cluster": {"kind": "slurm", "nodes": 2, "time": "08:00:00"}}


def test_a_long_time_limit(make, run_folder):
    events = [make.event("finished", 3600, step=40, loss=2.0)]
    found = facts(make, run_folder, [attempt(make, 0, 0, 3600)], [make.row(40, 3600)], events, **SLURM)
    assert settings(found) == ["cluster.time: 01:20:00"]
    assert "Only 12 % of the time limit was used" in next_time(found)[0].text


def test_a_time_limit_that_was_needed_gets_no_note(make, run_folder):
    events = [make.event("finished", 7 * 3600, step=40, loss=2.0)]
    assert settings(facts(make, run_folder, [attempt(make, 0, 0, 7 * 3600)], [], events, **SLURM)) == []


def test_waits_between_jobs_and_starts_that_take_long(make, run_folder):
    lines = [attempt(make, 0, 0, 3600), attempt(make, 1, 9000, 12600)]
    rows = [make.row(1, 3600, step_time_s=1800), make.row(2, 12600, step_time_s=1800)]
    events = [make.event("time_limit", 3600), make.event("time_limit", 12600)]
    assert settings(facts(make, run_folder, lines, rows, events, **SLURM)) == [
        "cluster.time: 16:00:00",
        "recovery.successors: 1",
    ]


def rank(number, node, compute_s, wait_dp_s=0.1):
    return RankRow(
        step=10, steps=10, generation=0, rank=number, device=f"{node}:cuda0", stages=[0], forward_s=[compute_s],
        backward_s=[0.0], wait_pp_s=0.0, wait_dp_s=wait_dp_s, wait_world_s=0.0, wait_device_s=0.0, hidden_dp_s=0.0,
        memory_bytes=1e9,
    )  # fmt: skip


def test_nodes_to_avoid(make, run_folder):
    events = [make.event("worker_died", at, node="n9") for at in (1, 2)]
    ranks = [rank(0, "n1", 1.0), rank(1, "n2", 1.0), rank(2, "n3", 1.4)]
    found = facts(make, run_folder, [], events=events, ranks=ranks, **SLURM)
    assert settings(found) == ["--exclude n9", "--exclude n3"]
    assert settings(facts(make, run_folder, [], ranks=ranks)) == [], "virtual nodes of one machine"


def test_waits_for_sums(make, run_folder):
    ranks = [rank(number, "local0", 1.0, wait_dp_s=1.0) for number in range(2)]
    assert settings(facts(make, run_folder, [], ranks=ranks)) == ["compression.mode: auto"]


def test_steps_that_were_done_again(make, run_folder):
    rows = [make.row(step, step) for step in (1, 2, 3, 4)] + [make.row(step, 10 + step, 1) for step in (3, 4, 5)]
    found = facts(make, run_folder, [], rows, checkpoint={"every": 50})
    assert settings(found) == ["checkpoint.every: 25"]
    assert settings(facts(make, run_folder, [], recovery={"memory": "off"})) == ["recovery.memory: auto"]
