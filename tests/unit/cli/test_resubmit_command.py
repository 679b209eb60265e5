"""`hpctrain resubmit`: never a second job in a run folder that is in use."""

from __future__ import annotations

import json
import os

import pytest
from run_folders import event, submitted_run

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.node import attempt
from hpctrain.records.history.past_runs import read_past_runs
from hpctrain.records.run.run import read_run
from hpctrain.runs.locate import record_job


@pytest.fixture
def submitted(monkeypatch):
    """Folders that were submitted."""
    found = []
    monkeypatch.setattr(
        "hpctrain.cli.commands.resubmit.submit_job",
        lambda folder, run, *_: found.append(folder.path) or "99",
    )
    return found


FAILED = event("failed", reason="1 of the nodes are left (gpu3)")


def test_a_run_that_ended_is_submitted_again(fake, runs, hpctrain, submitted):
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, FAILED)
    result = hpctrain("resubmit", "gpt")
    assert result.exit_code == 0, result.exception
    assert submitted == [folder]


def test_a_folder_that_others_can_write_to_is_not_submitted(fake, runs, hpctrain, submitted):
    """The job would find out, and end at once."""
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    submitted_run(runs, job, FAILED).chmod(0o777)
    assert "can be written by others (mode 777)" in str(hpctrain("resubmit", "gpt").exception)
    assert not submitted


def test_it_goes_on_with_other_settings(fake, runs, hpctrain, submitted):
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, FAILED)
    result = hpctrain("resubmit", job, "--set", "steps=20", "--set", "cluster.nodes=3")
    assert result.exit_code == 0, result.exception
    assert (read_run(folder / "run.yaml").steps, read_run(folder / "run-1.yaml").steps) == (20, 10)
    assert [past.job_id for past in read_past_runs(os.environ)] == ["99"]


def test_a_run_that_waits_for_another_one_from_now_on_is_known_to_it(fake, runs, hpctrain, submitted):
    other = submitted_run(runs, fake.submit("--nodes=1"), name="other-20260101T000001Z-00ff")
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job, FAILED)
    fake.finish(job, code=1)
    result = hpctrain("resubmit", "gpt", "--set", "cluster.after=other")
    assert result.exit_code == 0, result.exception
    assert read_run(folder / "run.yaml").cluster.after == [str(other)]
    assert (other / "followers").read_text() == f"{folder}\n"


def test_a_run_that_is_done_goes_on_with_more_steps(fake, runs, hpctrain, submitted):
    job = fake.submit("--nodes=2")
    fake.finish(job)
    submitted_run(runs, job, event("finished", step=10))
    for words in ([], ["--set", "cluster.nodes=1"]):
        assert "it is done; `--set steps=N` with more than 10" in str(hpctrain("resubmit", "gpt", *words).exception)
    assert not submitted
    assert hpctrain("resubmit", "gpt", "--set", "steps=20").exit_code == 0
    record_job(submitted[0], fake.submit("--nodes=3"))
    told = json.loads(hpctrain("status", "gpt", "--json").stdout)
    assert (told["state"], told["reason"], told["steps"]) == ("starting", "job 2 is running", 20)


@pytest.mark.parametrize("override", ["seed=4", "cluster.nodes=9"])
def test_settings_that_are_refused_change_nothing(fake, runs, hpctrain, submitted, override):
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, FAILED)
    before = (folder / "run.yaml").read_text()
    assert isinstance(hpctrain("resubmit", "gpt", "--set", override).exception, (InputError, RefusedError))
    assert (folder / "run.yaml").read_text() == before
    assert not list(folder.glob("run-*.yaml"))
    assert not submitted


@pytest.mark.parametrize("state", ["running", "pending"])
def test_a_job_that_lives_is_left_alone_whatever_the_files_say(fake, runs, hpctrain, submitted, state):
    if state == "pending":
        fake.submit("--nodes=3")
    job = fake.submit("--nodes=2")
    submitted_run(runs, job, FAILED)
    error = hpctrain("resubmit", "gpt").exception
    assert isinstance(error, InputError)
    assert job in str(error)
    assert not submitted


def test_a_controller_that_is_away_cannot_say_whether_the_job_has_ended(fake, runs, hpctrain, submitted):
    submitted_run(runs, fake.submit("--nodes=2"), FAILED)
    fake.away = True
    error = hpctrain("resubmit", "gpt").exception
    assert isinstance(error, RefusedError)
    assert "cannot tell whether its job 1 has ended" in str(error)
    assert "ask again later" in str(error)
    assert not submitted


def begin(folder, job, monkeypatch, fake):
    monkeypatch.setattr(attempt, "SystemRunner", lambda: fake)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    return attempt.begin(["--folder", str(folder)])


def test_a_job_that_comes_back_beside_its_successor_leaves_the_folder_alone(fake, runs, monkeypatch):
    old, new = fake.submit("--nodes=1"), fake.submit("--nodes=1")
    folder = submitted_run(runs, new)
    (folder / "finished").touch()
    with pytest.raises(RefusedError, match=f"the run went on as job {new}, which is RUNNING; this job \\({old}\\)"):
        begin(folder, old, monkeypatch, fake)
    assert (folder / "finished").exists()
    assert not (folder / "attempts.jsonl").exists()
    assert begin(folder, new, monkeypatch, fake) == 0
    fake.finish(new)
    assert begin(folder, old, monkeypatch, fake) == 0


def test_a_run_whose_checkpoints_are_gone_begins_again_only_when_asked(fake, runs, hpctrain, submitted):
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, event("checkpoint_saved", step=8), FAILED)
    refused = hpctrain("resubmit", "gpt").exception
    assert "all checkpoints are lost: step 8 was saved, and none is there now" in str(refused)
    assert refused.exit_code == 4
    assert not submitted
    told = json.loads(hpctrain("status", "gpt", "--json").stdout)
    assert told["state"] == "failed"
    result = hpctrain("resubmit", "gpt", "--from-seed")
    assert result.exit_code == 0, result.exception
    assert submitted == [folder]
    assert '"from_seed"' in (folder / "events.jsonl").read_text()
