"""The end of an attempt: how the run goes on, and what stands in its ledger then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm

from hpctrain.base.errors import CommandError
from hpctrain.base.process import CommandResult
from hpctrain.jobs.attempt_outcome import srun_log
from hpctrain.jobs.successors import CANCELLED_FILE
from hpctrain.node import attempt, run
from hpctrain.records.history.ledger import failures_since_checkpoint, read_successors
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id

RUN = """
name: gpt
steps: 10
cluster: {kind: slurm, nodes: 2}
model: {preset: tiny-1m}
data: {train: [/data]}
batch: {global: 8}
recovery: {retries: 1}
"""


def event(kind: EventKind, reason: str = "", attempt: int = 0, **data: object) -> Event:
    return Event(time_s=0, attempt=attempt, generation=0, node="gpu1", kind=kind, reason=reason, data=data)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "submitit").mkdir()
    return RunFolder(tmp_path)


def last_event(folder: RunFolder) -> dict[str, object]:
    return json.loads((folder.path / "events.jsonl").read_text().splitlines()[-1])


def begin(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> str:
    """A job of the run that runs; its id."""
    job = fake.submit("--nodes=2")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    (folder.path / "job_id").write_text(f"{job}\n")
    (folder.path / "submitit" / f"{job}_submitted.pkl").write_bytes(b"the task")
    return job


def close(folder: RunFolder, kind: EventKind, *more: str, code: int = 75, **data: object) -> int:
    """The end of an attempt that wrote one event."""
    number = folder.begin_attempt(["gpu1", "gpu2"], 0.0, os.environ["SLURM_JOB_ID"])
    said = event(kind, "asked to stop" if kind == "preempted" else "it broke", number, **data)
    with (folder.path / "events.jsonl").open("a") as file:
        file.write(json.dumps(said.to_json()) + "\n")
    if kind == "preempted":
        (folder.path / "checkpoints" / f"step-000000{10 + number}").mkdir()
    words = ["--folder", str(folder.path), "--attempt", str(number), "--code", str(code)]
    return attempt.end([*words, *more])


def test_a_run_goes_on_as_a_new_job(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> None:
    job = begin(folder, monkeypatch, fake)
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert (fake.jobs[int(job)].restarts, fake.jobs[int(job)].requeue) == (0, False)
    (submitted,) = [argv for argv in fake.argvs if argv[0] == "sbatch" and str(folder.path / "job.sh") in argv]
    assert submitted == ("sbatch", "--parsable", f"--dependency=afterany:{job}", str(folder.path / "job.sh"))
    assert job_id(folder.path) == "2"
    assert [(item.job_id, item.after) for item in read_successors(folder.path)] == [("2", job)]
    assert (folder.path / "submitit" / "2_submitted.pkl").read_bytes() == b"the task"
    line = folder.attempts()[-1]
    assert (line["class"], line["reason"]) == (
        "resumable", "stopped before the time limit, saved, and back to the queue",
    )  # fmt: skip
    assert (line["checkpoint_before"], line["checkpoint_after"]) == ("step-00000005", "step-00000010")


REFUSED = "srun: error: Unable to create step for job 1: Invalid node name specified\n"


def test_a_step_that_slurm_did_not_start_is_no_failure_of_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder, monkeypatch, fake)
    said = srun_log(folder.path, 0)
    said.parent.mkdir(parents=True)
    said.write_text(REFUSED)
    assert close(folder, "node_lost", "--again", "new_job", code=137, node="gpu2") == 137
    line = folder.attempts()[-1]
    assert line["class"] == "infrastructure"
    assert str(line["reason"]).startswith("Slurm could not start the step (srun: Unable to create step for job 1: ")
    assert str(line["reason"]).endswith("; back to the queue")
    assert failures_since_checkpoint(folder.attempts()) == 0
    assert job_id(folder.path) == "2", "the run goes on"
    # The last lines of the job's log say so too.
    assert f"attempt 0 ended (infrastructure): {line['reason']}" in capsys.readouterr().err


def test_the_time_limit_is_an_event_and_a_signal_by_hand_is_none(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    job = begin(folder, monkeypatch, fake)
    fake.jobs[int(job)] = replace(fake.jobs[int(job)], end_s=int(time.time()) + 100)
    assert close(folder, "preempted", "--again", "new_job", asked_by="SIGTERM") == 75
    assert last_event(folder)["kind"] == "preempted"
    assert str(folder.attempts()[-1]["reason"]).startswith("stopped by SIGTERM, sent by neither")
    assert close(folder, "preempted", "--again", "new_job", asked_by="SIGUSR2") == 75
    assert last_event(folder)["kind"] == "time_limit"
    assert last_event(folder)["reason"] == folder.attempts()[-1]["reason"]
    assert folder.attempts()[-1]["reason"] == "stopped before the time limit, saved, and back to the queue"


def test_a_run_that_wants_it_keeps_its_job(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> None:
    begin(folder, monkeypatch, fake)
    assert close(folder, "preempted", "--again", "same_job") == 75
    assert fake.jobs[1].restarts == 1
    assert len(fake.jobs) == 1


def test_a_job_that_comes_back_does_without_the_node_that_the_verdict_excludes(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    """No plan can use it, so it counts as lost: no retry is spent, however few there are."""
    text = RUN.replace("nodes: 2", "nodes: 2, exclude: gpu9").replace("retries: 1", "retries: 0")
    (folder.path / "run.yaml").write_text(text.replace("retries: 0", "retries: 0, exclude_max_fraction: 0.4"))
    job = begin(folder, monkeypatch, fake)
    said = [event("attempt_started", nodes=["gpu1", "gpu2"]), event("probed", exclude=["gpu2"])]
    (folder.path / "events.jsonl").write_text("".join(json.dumps(item.to_json()) + "\n" for item in said))
    both = ["gpu1", "gpu2"]
    assert close(folder, "failed", "--again", "same_job", code=4, exit_code=4, left=both) == 4
    assert folder.attempts()[-1]["class"] == "infrastructure"
    assert (fake.jobs[int(job)].restarts, fake.jobs[int(job)].exclude) == (1, "gpu2,gpu9")


def test_where_sbatch_refuses_the_job_itself_comes_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    begin(folder, monkeypatch, fake)
    (folder.path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=9\n")
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert fake.jobs[1].restarts == 1
    assert job_id(folder.path) == "1"


def test_a_damaged_ledger_of_nodes_does_not_stop_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder, monkeypatch, fake)
    (folder.path / "bad_nodes.jsonl").write_text('{"node": "None assigned"}\n')
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert fake.jobs[1].restarts == 1
    assert "bad_nodes.jsonl: node:" in capsys.readouterr().err


def test_a_run_that_was_cancelled_gets_no_other_job(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    begin(folder, monkeypatch, fake)
    (folder.path / CANCELLED_FILE).touch()
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert len(fake.jobs) == 1


def test_the_lost_node_is_not_asked_for_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    (folder.path / "run.yaml").write_text(RUN.replace("nodes: 2", "nodes: 2, exclude: gpu9"))
    (folder.path / "run.yaml").write_text(
        (folder.path / "run.yaml").read_text().replace("retries: 1", "retries: 1, exclude_max_fraction: 0.4")
    )
    begin(folder, monkeypatch, fake)
    (folder.path / "events.jsonl").write_text(
        json.dumps(event("attempt_started", nodes=["gpu1", "gpu2"]).to_json()) + "\n"
    )
    assert close(folder, "failed", "--again", "new_job", exit_code=75, left=["gpu1"]) == 75
    assert folder.attempts()[-1]["class"] == "infrastructure"
    (submitted,) = [argv for argv in fake.argvs if argv[0] == "sbatch" and str(folder.path / "job.sh") in argv]
    assert "--exclude=gpu2,gpu9" in submitted


def test_a_run_that_fails_again_and_again_ends(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    (folder.path / "run.yaml").write_text(RUN.replace("retries: 1", "retries: 1, successors: 1"))
    job = begin(folder, monkeypatch, fake)
    waiting = fake.submit("--nodes=3")
    line = {"job_id": waiting, "after": job, "time_s": 0}
    (folder.path / "successors.jsonl").write_text(json.dumps(line) + "\n")
    assert close(folder, "failed", "--again", "new_job", code=1, exit_code=1) == 1
    assert (job_id(folder.path), len(fake.jobs)) == (waiting, 2), "what waited is the run's job now"
    fake.finish(job, code=1)
    last = fake.submit("--nodes=3")
    with (folder.path / "successors.jsonl").open("a") as file:
        file.write(json.dumps({"job_id": last, "after": waiting, "time_s": 0}) + "\n")
    monkeypatch.setenv("SLURM_JOB_ID", waiting)
    assert close(folder, "failed", "--again", "new_job", code=1, exit_code=1) == 1
    assert [line["class"] for line in folder.attempts()] == ["fatal", "fatal"]
    assert fake.jobs[int(last)].state == "CANCELLED"
    assert last_event(folder)["kind"] == "failed"
    assert f"go on with `hpctrain resubmit {folder.path.name}`" in str(last_event(folder)["reason"])
    assert "retries is 1" in str(last_event(folder)["reason"])


def test_in_an_allocation_nothing_is_queued(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    begin(folder, monkeypatch, fake)
    assert close(folder, "preempted") == 75
    assert (len(fake.jobs), fake.jobs[1].restarts) == (1, 0)
    assert last_event(folder)["data"] == {"cancelled": True}
    assert "hpctrain resubmit" in folder.attempts()[-1]["reason"]


def test_a_finished_run_is_a_success_whatever_srun_gave(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    begin(folder, monkeypatch, fake)
    (folder.path / run.FINISHED_FILE).touch()
    assert close(folder, "preempted", "--again", "new_job") == 0
    assert (folder.attempts()[-1]["code"], folder.attempts()[-1]["class"]) == (0, "done")
    assert len(fake.jobs) == 1


def test_a_controller_that_is_away_at_the_end_is_asked_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job = begin(folder, monkeypatch, fake)
    fake.away = True
    clock = FakeClock(on_sleep=lambda _: setattr(fake, "away", clock.now() < 20))
    fake.jobs[int(job)] = replace(fake.jobs[int(job)], end_s=int(clock.wall()) + 100)
    monkeypatch.setattr(attempt, "SystemClock", lambda: clock)
    assert close(folder, "preempted", "--again", "same_job", asked_by="SIGUSR2") == 75
    assert fake.jobs[int(job)].restarts == 1
    assert folder.attempts()[-1]["reason"] == "stopped before the time limit, saved, and back to the queue"
    assert capsys.readouterr().err.count("attempt 0 ended") == 1


def test_a_controller_that_stays_away_is_no_silent_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    begin(folder, monkeypatch, fake)
    fake.away = True
    clock = FakeClock()
    monkeypatch.setattr(attempt, "SystemClock", lambda: clock)
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert last_event(folder)["kind"] == "failed"
    assert "could not be queued again (the Slurm controller is away" in str(last_event(folder)["reason"])
    assert 60 <= clock.now() < 70


def test_a_successor_needs_no_controller_that_answers_now(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    job = begin(folder, monkeypatch, fake)
    line = {"job_id": "2", "after": job, "time_s": 0}
    (folder.path / "successors.jsonl").write_text(json.dumps(line) + "\n")
    fake.away = True
    clock = FakeClock()
    monkeypatch.setattr(attempt, "SystemClock", lambda: clock)
    assert close(folder, "preempted", "--again", "new_job") == 75
    assert last_event(folder)["kind"] == "preempted", "the run has not failed"
    assert folder.attempts()[-1]["class"] == "resumable"


class Deaf(FakeSlurm):
    """Takes the requeue, and is away before it answers."""

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        done = super().run(argv, timeout_s, env)
        return CommandResult(done.argv, 1, "", "Socket timed out on send/recv\n") if argv[1] == "requeue" else done


def test_a_requeue_whose_answer_is_lost_is_not_asked_twice(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = Deaf(), FakeClock()
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    monkeypatch.setattr(attempt, "SystemClock", lambda: clock)
    fake.submit("--nodes=3", "--hold")
    begin(folder, monkeypatch, fake)
    assert close(folder, "preempted", "--again", "same_job") == 75
    assert sum(argv[1] == "requeue" for argv in fake.argvs) == 1
    assert folder.attempts()[-1]["class"] == "resumable"


def test_a_requeue_that_slurm_refuses_is_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    def refused(*_: object) -> None:
        raise CommandError("scontrol requeue 1: Access/permission denied")

    begin(folder, monkeypatch, fake)
    monkeypatch.setattr(attempt, "requeue_excluding_bad_nodes", refused)
    assert close(folder, "preempted", "--again", "same_job") == 75
    assert last_event(folder)["kind"] == "failed"
    assert "permission denied" in str(last_event(folder)["reason"])


def test_a_new_job_starts_from_the_environment_of_the_first(tmp_path: Path) -> None:
    """Not from what cluster.setup made of it: paths would grow from job to job."""
    code = "import os, sys; os.environ['PATH'] = 'longer'; print('up', flush=True); sys.stdin.read()"
    env = {"PATH": os.environ["PATH"], "MINE": "a=b", "CUDA_VISIBLE_DEVICES": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        script.stdout.readline()
        found = attempt.environment_of(script.pid)
    assert found["PATH"] == env["PATH"]
    assert found["MINE"] == "a=b"
    assert "CUDA_VISIBLE_DEVICES" not in found


LOADED_LATE = """
import os, sys
from hpctrain.node import __main__ as program, run

def loaded_late(argv):
    os.kill(os.getpid(), int(sys.argv[1]))
    stop = run._StopRequest(None)
    stop.listen()
    return 75 if stop() else 0

run.main = loaded_late
sys.exit(program.main(["run"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_while_the_program_loads_is_heard_later(number: signal.Signals) -> None:
    """In a process of its own: a signal goes to any thread that does not block it."""
    done = subprocess.run([sys.executable, "-c", LOADED_LATE, str(int(number))], timeout=600, check=False)
    assert done.returncode == 75
