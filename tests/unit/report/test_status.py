"""What state a run is in, from its files, the time and its lock."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.records.run.run import Run
from hpctrain.report.status import decide_status, lock_held, read_status

NODES = ["local0", "local1", "local2", "local3"]


@pytest.fixture
def run(make):
    return Run.from_json(make.run)


@pytest.fixture
def slurm_run(make):
    return Run.from_json({**make.run, "cluster": {"kind": "slurm"}})


def decide(make, run, events=(), rows=(), at=100.0, held=True):
    return decide_status(run, list(events), list(rows), make.start_s + at, held)


def begin(make, at=0.0, generation=0, restore=None):
    return make.started(at, generation, restore, NODES, "plan.json", pp=2, dp=2, tp=1)


def test_a_held_folder_without_a_line_is_starting(make, run):
    status = decide(make, run)
    assert (status.state, status.step, status.steps) == ("starting", 0, 40)
    assert status.last_sign_s is None


def test_an_untouched_run_is_queued_where_there_is_a_queue(make, run, slurm_run):
    assert decide(make, slurm_run, held=False).state == "queued"
    assert decide(make, run, held=False).state == "unknown"


def test_it_is_starting_until_the_first_step_is_done(make, run):
    status = decide(make, run, [make.event("attempt_started", 0), begin(make, 3)])
    assert status.state == "starting"
    assert status.reason == "generation 0 starts from the seed on 4 nodes (pp 2 × dp 2 × tp 1)"
    assert status.nodes == NODES


def test_a_slow_rank_is_named_while_the_run_trains(make, run):
    rows, slow = [make.row(1, 1)], "rank 1 is slow"
    for at, held, told in ((1, True, slow), (1000, False, None)):
        assert decide_status(run, [begin(make)], rows, make.start_s + at, held, slow_rank=slow).slow_rank == told


def test_it_is_running_with_steps(make, run):
    status = decide(make, run, [begin(make)], [make.row(step, step) for step in range(1, 11)], at=10)
    assert (status.state, status.step, status.loss) == ("running", 10, make.row(10, 10).loss)
    assert status.eta_s == pytest.approx(30 * 0.5)
    assert status.reason == "step 10 done in 500 ms"


@pytest.mark.parametrize("fault", ["worker_died", "node_lost"])
def test_it_is_recovering_from_a_fault_until_training_goes_on(make, run, fault):
    events = [begin(make), make.event(fault, 8, node="local2")]
    rows = [make.row(step, step) for step in range(1, 6)]
    status = decide(make, run, events, rows)
    assert status.state == "recovering"
    assert "local2" in status.reason
    assert status.eta_s is None

    events.append(begin(make, 9, 1, 4))
    status = decide(make, run, events, rows)
    assert (status.state, status.generation, status.step) == ("recovering", 1, 4)
    assert "from step 4" in status.reason

    events.append(make.event("recovered", 12, 1, step=5, seconds=4.0))
    status = decide(make, run, events, [*rows, make.row(5, 12, 1)])
    assert (status.state, status.recoveries, status.lost_steps) == ("running", 1, 1)


@pytest.mark.parametrize("held", [True, False])
def test_how_it_ended_counts_more_than_the_lock(make, run, held):
    events, rows = make.history()
    status = decide(make, run, events, rows, held=held)
    assert (status.state, status.reason) == ("done", "finished at step 40 with loss 2.1")
    failed = [*events[:-1], make.event("failed", 40, 1, reason="3 failures in a row")]
    assert decide(make, run, failed, rows, held=held).state == "failed"
    assert decide(make, run, failed, rows, held=held).reason == "3 failures in a row"
    cancelled = [*events[:-1], make.event("failed", 40, 1, reason="stopped by Ctrl-C", cancelled=True)]
    assert decide(make, run, cancelled, rows, held=held).state == "cancelled"


def test_a_failure_of_a_node_that_was_cut_off_is_not_the_runs(make, slurm_run):
    alone = make.event("failed", 9, 0, reason="1 of the nodes are left (local3)")
    events = [begin(make), alone]
    assert decide(make, slurm_run, events, held=False).state == "failed"
    went_on = [*events, begin(make, 10, 1, 4)]
    assert decide(make, slurm_run, went_on, [make.row(5, 12, 1)], at=20, held=False).state == "running"
    late = [begin(make), begin(make, 8, 1, 4), alone]
    assert decide(make, slurm_run, late, [make.row(5, 12, 1)], at=20, held=False).state == "running"
    finished = [*late, make.event("finished", 30, 1, step=40), alone]
    assert decide(make, slurm_run, finished, held=False).state == "done"


def test_a_failure_that_the_job_script_writes_counts(make, slurm_run):
    script = make.event("failed", 40, -1, reason="the job could not be requeued")
    assert decide(make, slurm_run, [begin(make), begin(make, 9, 1, 4), script], held=False).state == "failed"


def test_a_process_that_vanished_without_a_word_is_a_failure(make, run):
    status = decide(make, run, [begin(make)], [make.row(1, 1)], at=91, held=False)
    assert status.state == "failed"
    assert "is gone and did not say why" in status.reason
    assert status.last_sign_s == 90


def test_under_slurm_a_lock_that_cannot_be_seen_from_here_is_no_proof(make, slurm_run):
    files = ([begin(make)], [make.row(1, 1)])
    assert decide(make, slurm_run, *files, at=20, held=False).state == "running"
    assert decide(make, slurm_run, *files, at=2000, held=False).state == "unknown"


@pytest.mark.parametrize("kind", ["preempted", "time_limit"])
def test_a_paused_run_waits_for_the_queue(make, run, slurm_run, kind):
    events = [begin(make), make.event(kind, 5, reason="SIGTERM from Slurm")]
    rows = [make.row(1, 1)]
    assert decide(make, slurm_run, events, rows, held=False).state == "requeued"
    assert decide(make, run, events, rows, held=False).state == "cancelled"


def test_a_new_attempt_starts_afresh(make, run):
    events, rows = make.history()
    events = [*events[:-1], make.event("failed", 40, 1, reason="no node left")]
    events.append(make.event("attempt_started", 100, 1).model_copy(update={"attempt": 1}))
    status = decide(make, run, events, rows)
    assert (status.state, status.attempt, status.step) == ("starting", 1, 40)


def test_the_lock_is_seen_while_somebody_holds_it(run_folder):
    lock = run_folder.path / "run.lock"
    assert not lock_held(run_folder.path)
    lock.touch()
    assert not lock_held(run_folder.path)
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock_held(run_folder.path)
        assert lock_held(run_folder.path)  # asking takes nothing
    finally:
        os.close(descriptor)
    assert not lock_held(run_folder.path)


def test_status_of_a_folder(make, finished_run):
    status = read_status(finished_run.path, make.start_s + 50)
    assert (status.state, status.step, status.lost_steps, status.valid_loss) == ("done", 40, 5, 2.3)
    assert status.last_sign_s == pytest.approx(11.0)


def test_the_command_by_name(finished_run, monkeypatch):
    monkeypatch.chdir(finished_run.path.parent.parent)
    result = CliRunner().invoke(cli, ["status", "fable"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "fable: done - finished at step 40 with loss 2.1"


def test_the_machine_form_is_one_object_without_absent_values(run_folder):
    result = CliRunner().invoke(cli, ["status", str(run_folder.path), "--json"], catch_exceptions=False)
    value = json.loads(result.stdout)
    assert {"state", "reason", "attempt", "generation", "step", "steps", "nodes"} <= set(value)
    assert (value["state"], value["step"], value["steps"], value["nodes"]) == ("unknown", 0, 40, [])
    assert "loss" not in value
    assert value["folder"] == str(run_folder.path)


def test_a_restart_without_a_loss_is_recovering_until_its_first_step(make, run):
    events = [begin(make), begin(make, 9, 1, 4)]
    rows = [make.row(step, step) for step in range(1, 6)]
    assert decide(make, run, events, rows).state == "recovering"
    assert decide(make, run, events, [*rows, make.row(5, 12, 1)]).state == "running"


def test_before_the_first_generation_its_number_is_not_negative(make, run):
    status = decide(make, run, [make.event("attempt_started", 0, -1, "attempt 0 on 4 nodes")])
    assert (status.generation, status.reason) == (0, "attempt 0 on 4 nodes")


def test_other_software_than_in_the_first_attempt_is_a_warning_of_this_attempt(make, run):
    changed = make.event("environment_changed", 1.0, reason="changed since attempt 0: torch 2.7.1 → 2.8.0")
    events = [begin(make), changed]
    rows = [make.row(1, 2.0)]
    assert decide(make, run, events, rows).warning == "changed since attempt 0: torch 2.7.1 → 2.8.0"
    again = make.event("attempt_started", 3.0)
    assert decide(make, run, [*events, again], rows).warning is None
    done = make.event("finished", 3.0, step=40)
    assert decide(make, run, [*events, done], rows).warning is None
