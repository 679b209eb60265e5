"""Runs that were started elsewhere: `list`, names and job ids from any folder, runs of another cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_folders import event, submitted_run

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.records.history.past_runs import PastRun, append_past_run, history_file
from hpctrain.runs.started_runs import add_to_history
from hpctrain.slurm.commands import Slurm


def listed(result) -> dict[str, str]:
    return {Path(row["folder"]).name: row["state"] for row in json.loads(result.stdout)}


@pytest.fixture
def elsewhere(fake, runs, tmp_path):
    """A run that waits, one that is done and one that was removed, none of them in ./runs."""
    folders = {}
    for number, name in enumerate(("done", "waits", "gone")):
        job = fake.submit("--nodes=3")
        events = [event("finished", 0, step=10)] if name == "done" else []
        folders[name] = submitted_run(tmp_path / "far", job, *events, name=f"{name}-2026010{number + 1}T000000Z-00ff")
        add_to_history("submit", folders[name], job, Slurm(fake))
    shutil.rmtree(folders["gone"])
    return folders


def test_runs_elsewhere_are_listed_by_age_with_one_question_to_the_queue(fake, runs, hpctrain, elsewhere):
    submitted_run(runs, None, name="near-20260102T120000Z-00ff")
    before = len(fake.argvs)
    assert listed(hpctrain("list", "--json")) == {
        "done-20260101T000000Z-00ff": "done",
        "waits-20260102T000000Z-00ff": "queued",
        "near-20260102T120000Z-00ff": "queued",
        "gone-20260103T000000Z-00ff": "gone",
    }
    assert sum(argv[0] == "squeue" for argv in fake.argvs[before:]) == 1
    rows = json.loads(hpctrain("list", "--json").stdout)
    assert [(row["name"], row["job_id"]) for row in rows] == [
        ("done", "1"), ("waits", "2"), ("near", None), ("gone", "3")
    ]  # fmt: skip
    assert list(listed(hpctrain("list", "--here", "--json"))) == ["near-20260102T120000Z-00ff"]
    assert "gone" in hpctrain("list").stdout.splitlines()[-1]


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_name_or_a_job_from_any_folder(fake, runs, hpctrain, elsewhere, verb):
    (elsewhere["waits"] / "logs" / "2.job.log").write_text("a line\n")
    for run in ("waits", "2", elsewhere["waits"].name, str(elsewhere["waits"])):
        result = hpctrain(verb, run)
        assert result.exit_code == 0, result.exception
    error = hpctrain(verb, "gone").exception
    assert isinstance(error, InputError)
    assert "is gone" in str(error)


def test_a_job_of_another_cluster_is_not_taken_for_the_one_here(fake, runs, hpctrain, monkeypatch, tmp_path):
    job = fake.submit("--nodes=1")
    folder = submitted_run(tmp_path / "far", job)
    add_to_history("submit", folder, job, Slurm(fake))
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "starting"
    past = {"time_s": 1.0, "verb": "submit", "name": "gpt", "folder": str(folder), "job_id": job, "cluster": "alps"}
    append_past_run(history_file({"XDG_STATE_HOME": str(tmp_path / "other")}), PastRun(**past))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    told = json.loads(hpctrain("status", "gpt", "--json").stdout)
    assert (told["state"], "its job 1 is on cluster alps" in told["reason"]) == ("queued", True)
    error = hpctrain("cancel", "gpt").exception
    assert isinstance(error, RefusedError)
    assert "use `hpctrain cancel gpt-20260101T000000Z-00ff` there" in str(error)
    assert fake.jobs[1].state == "RUNNING"


def test_a_home_that_cannot_be_written_stops_no_run(fake, runs, monkeypatch, tmp_path):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    lines = add_to_history("submit", submitted_run(runs, "7"), "7")
    assert [line.split(":")[0] for line in lines] == ["this run is not in the history"]
