"""A job that begins: it takes over, or finds that there is nothing to do; no run ever goes on twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import MIN_JOB_AGE_S, FakeSlurm
from run_folders import submitted_run

from hpctrain.base.errors import RefusedError
from hpctrain.jobs.dependencies import DEPENDENT_RUNS_FILE
from hpctrain.jobs.successors import CANCELLED_FILE
from hpctrain.node import attempt
from hpctrain.records.history.ledger import read_successors
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id, open_jobs, record_job
from hpctrain.slurm.values import SEPARATOR

RUN = {
    "name": "gpt",
    "steps": 10,
    "model": {"preset": "tiny-1m"},
    "data": {"train": ["/data"]},
    "batch": {"global": 8},
    "cluster": {"kind": "slurm", "nodes": "1"},
    "recovery": {"retries": 1, "successors": 1},
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, fake: FakeSlurm) -> RunFolder:
    """A run whose job 1 runs, with job 2 queued behind it."""
    for name in ("checkpoints", "submitit"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    (tmp_path / "job_id").write_text(fake.submit("--nodes=1", "--no-requeue") + "\n")
    queued = {"job_id": fake.submit("--nodes=1", "--hold"), "after": "1", "time_s": 0.0}
    (tmp_path / "successors.jsonl").write_text(json.dumps(queued) + "\n")
    for job in ("1", "2"):
        (tmp_path / "submitit" / f"{job}_submitted.pkl").write_bytes(b"the task")
    folder = RunFolder(tmp_path)
    folder.begin_attempt(["gpu1"], 0.0, "1")
    return folder


def event(kind: EventKind, number: int = 0, **data: object) -> str:
    said = Event(time_s=0, attempt=number, generation=0, node="gpu1", kind=kind, reason=f"it {kind}", data=data)
    return json.dumps(said.to_json()) + "\n"


def begin(
    folder: RunFolder, job: str, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...] = ("--again", "new_job")
) -> int:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu2")
    return attempt.begin(["--folder", str(folder.path), *more])


def test_a_job_that_comes_back_says_that_it_was_put_back(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sent the signal, for a requeue by hand: it is nobody's foreign signal, and no time limit."""
    (folder.path / "events.jsonl").write_text(event("preempted", asked_by="SIGTERM"))
    assert begin(folder, "1", monkeypatch) == 0
    assert folder.attempts()[0]["class"] == "no_progress"
    assert folder.attempts()[0]["reason"] == "its job was put back into the queue: it preempted"


def test_a_task_of_an_array_is_the_job_that_squeue_shows(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SLURM_JOB_ID is new at every start, or the id of the whole array."""
    array = fake.submit("--array=0-1")
    record_job(folder.path, f"{array}_1")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", array)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert begin(folder, array, monkeypatch, ("--again", "same_job")) == 0
    assert folder.attempts()[-1]["job_id"] == job_id(folder.path) == f"{array}_1"


def test_a_successor_takes_over_from_a_job_that_vanished(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_node("gpu1")
    assert fake.jobs[1].state == "NODE_FAIL"
    assert begin(folder, "2", monkeypatch) == 0
    assert capsys.readouterr().out == "1\n"
    first, second = folder.attempts()
    assert (first["class"], first["reason"]) == ("infrastructure", "Slurm ended the job: NODE_FAIL")
    assert (second["job_id"], second["nodes"]) == ("2", ["gpu2"])
    assert job_id(folder.path) == "2"
    assert [item.after for item in read_successors(folder.path)] == ["1", "2"], "it queued the next one"


def test_of_a_job_that_slurm_has_forgotten_accounting_tells(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.finish("1", code=1)
    fake.advance(MIN_JOB_AGE_S + 1)
    assert 1 not in fake.jobs
    told = ("1", "OUT_OF_MEMORY", "0:125", "gpu1", "100", "200", "300", "01:00:00", "low", "None")
    fake.accounting = SEPARATOR.join(told) + "\n"
    assert begin(folder, "2", monkeypatch) == 0
    assert (folder.attempts()[0]["class"], folder.attempts()[0]["reason"]) == (
        "fatal",
        "Slurm ended the job: OUT_OF_MEMORY",
    )


def test_who_waits_for_the_run_hears_of_every_job_that_it_gets(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = submitted_run(folder.path.parent / "runs", fake.submit("--nodes=1", "--dependency=afterany:1:2"))
    waits = {**RUN, "cluster": {**RUN["cluster"], "after": [str(folder.path)], "after_end": "any"}}
    (follower / "run.yaml").write_text(json.dumps(waits))
    (folder.path / DEPENDENT_RUNS_FILE).write_text(f"{follower}\n")
    fake.finish("1", code=1)
    assert begin(folder, "2", monkeypatch) == 0
    assert open_jobs(folder.path) == ["2", "4"]
    assert fake.jobs[3].dependency == "afterany:2:4"


def test_one_run_never_goes_on_twice(folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match="the run went on as job 1, which is RUNNING"):
        begin(folder, "2", monkeypatch)
    fake.finish("1", code=1)
    assert begin(folder, "2", monkeypatch) == 0
    # Slurm brings the first one back beside it.
    with pytest.raises(RefusedError, match="the run went on as job 2"):
        begin(folder, "1", monkeypatch)
    # The run was resubmitted: what was queued for its earlier life is no part of it, even when the new job has ended.
    again = fake.submit("--nodes=1")
    with (folder.path / "job_id").open("a") as file:
        file.write(f"{again}\n")
    fake.finish(again, code=1)
    with pytest.raises(RefusedError, match=r"went on as job 4; this job \(3\) was queued for an earlier one"):
        begin(folder, "3", monkeypatch)
    assert len(folder.attempts()) == 2


@pytest.mark.parametrize("how", ["finished", "ledger", "cancelled", "scancel"])
def test_a_job_that_is_not_needed_any_more_ends_at_once(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    last = {"job_id": fake.submit("--nodes=1", "--hold"), "after": "2", "time_s": 0.0}
    with (folder.path / "successors.jsonl").open("a") as file:
        file.write(json.dumps(last) + "\n")
    if how == "finished":
        (folder.path / "finished").touch()
    elif how == "ledger":
        folder.end_attempt(0, 1.0, "all steps are done", 0, "done")
    elif how == "cancelled":
        (folder.path / CANCELLED_FILE).touch()
    if how == "scancel":
        fake.run(["scancel", "1"])
    else:
        fake.finish("1")
    # Whoever waits for its good end does not start after a run that was cancelled.
    assert begin(folder, "2", monkeypatch) == (75 if how in ("cancelled", "scancel") else 0)
    said = capsys.readouterr()
    assert {"scancel": "its job 1 was cancelled", "cancelled": "was cancelled"}.get(how, "is finished") in said.err
    assert len(folder.attempts()) == 1
    assert fake.jobs[3].state == "CANCELLED", "and so does what waits"
    assert fake.jobs[2].state == "PENDING", "this job ends by itself"


def test_a_run_that_failed_too_often_is_not_begun_again(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.end_attempt(0, 1.0, "the loss is nan", 1, "fatal")
    folder.begin_attempt(["gpu1"], 2.0, "1")
    # Its script was killed before it could say so, but its agents were not.
    (folder.path / "events.jsonl").write_text(event("failed", 1, exit_code=1))
    fake.finish("1", code=1)
    assert begin(folder, "2", monkeypatch) == 1
    assert [line["class"] for line in folder.attempts()] == ["fatal", "fatal"]
    last = json.loads((folder.path / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "failed"
    assert "it failed; 2 failures in a row without a new checkpoint (recovery.retries is 1)" in last["reason"]


def test_a_run_whose_checkpoints_are_gone_says_so_first_and_stops(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / "events.jsonl").write_text(event("checkpoint_saved", step=5000))
    fake.fail_node("gpu1")
    assert begin(folder, "2", monkeypatch) == 4, "as an agent that finds them lost"
    said = capsys.readouterr()
    assert "all checkpoints are lost: step 5000 was saved, and none is there now" in said.err.splitlines()[0]
    last = json.loads((folder.path / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "failed"
    assert "--from-seed" in last["reason"]
    assert len(folder.attempts()) == 1


def test_a_person_who_submits_again_starts_the_count_anew(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        folder.end_attempt(number, 1.0, "the loss is nan", 1, "fatal")
        folder.begin_attempt(["gpu1"], 2.0, "1")
    folder.end_attempt(2, 1.0, "the loss is nan", 1, "fatal")
    fake.finish("1", code=1)
    again = fake.submit("--nodes=1")
    (folder.path / "submitit" / f"{again}_submitted.pkl").write_bytes(b"the task")
    with (folder.path / "job_id").open("a") as file:
        file.write(f"{again}\n")
    assert begin(folder, again, monkeypatch) == 0
    assert len(folder.attempts()) == 4


@pytest.mark.parametrize("more", [(), ("--again", "same_job")])
def test_nothing_is_queued_behind_a_job_that_a_person_submitted(
    folder: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """job.sh has no directives there, and an allocation is the person's."""
    (folder.path / "successors.jsonl").unlink()
    assert begin(folder, "1", monkeypatch, more) == 0
    assert not any(argv[0] == "sbatch" for argv in fake.argvs)
    assert not read_successors(folder.path)
