"""`list`, `logs`, `status`, `cancel`: looking at runs, and stopping them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.errors import InputError
from hpctrain.launch.folder import lock_run_folder
from hpctrain.records.locate import record_job


def states(result):
    return [row["state"] for row in json.loads(result.stdout)]


def test_all_runs_are_one_question_to_slurm(fake, runs, hpctrain):
    for number in range(4):
        job = fake.submit("--nodes=1")
        submitted_run(runs, job, name=f"gpt-20260101T00000{number}Z-00ff")
    submitted_run(runs, "1", event("finished"), name="old-20250101T000000Z-00ff")
    (runs / "torn-20270101T000000Z-00ff").mkdir()
    (runs / "torn-20270101T000000Z-00ff" / "run.yaml").write_text("steps: [")
    before = len(fake.argvs)
    assert states(hpctrain("list", "--json")) == ["done", "starting", "starting", "starting", "queued", "unknown"]
    assert [argv[0] for argv in fake.argvs[before:]] == ["sbatch", "squeue"]


def test_done_runs_ask_nobody(fake, runs, hpctrain):
    submitted_run(runs, "1", event("finished"))
    assert states(hpctrain("list", "--json")) == ["done"]
    assert fake.argvs == []


def test_a_controller_that_is_away_is_waited_for_once(fake, runs, hpctrain):
    for number in range(3):
        submitted_run(runs, str(number + 1), name=f"gpt-20260101T00000{number}Z-00ff")
    fake.away = True
    rows = json.loads(hpctrain("list", "--json").stdout)
    assert all("the Slurm controller does not answer" in row["reason"] for row in rows)
    assert len(fake.argvs) == 2


def test_a_run_whose_agents_gave_up_is_not_over_before_its_job_is(fake, runs, hpctrain):
    submitted_run(runs, fake.submit("--nodes=2"), event("failed", reason="no node left"))
    told = json.loads(hpctrain("status", "gpt", "--json").stdout)
    assert (told["state"], told["reason"]) == ("recovering", "no node left; its job 1 is running still")
    fake.finish("1", code=1)
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "failed"


@pytest.fixture
def logs(runs):
    """Two attempts of job 7, one of job 9, on nodes with and without dots."""
    folder = submitted_run(runs, "7")
    record_job(folder, "9")
    lines = [{"attempt": number, "job_id": job} for number, job in enumerate(["7", "7", "9"])]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ["7.job.log", "9.job.log", "7.n1.agent.log", "9.n1.agent.log", "9.n2.agent.log"]
    names += [f"{attempt}/{node}.0.log" for attempt in range(3) for node in ("n1.site.org", "n2")]
    for name in names:
        path = folder / "logs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("line\n")
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--attempt", "1"], "7.job 7.n1.agent 1/n1.site.org.0 1/n2.0"),
        (["--attempt", "2", "--node", "n2"], "9.n2.agent 2/n2.0"),
        (["--attempt", "2", "--node", "n1.site.org"], "9.n1.agent 2/n1.site.org.0"),
    ],
)
def test_logs_of_an_attempt_and_a_node(logs, hpctrain, words, expected):
    result = hpctrain("logs", "7", *words)
    found = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("==>")}
    assert found == {f"logs/{name}.log" for name in expected.split()}


def test_a_process_of_another_machine_is_never_signalled(runs, hpctrain, monkeypatch):
    folder = submitted_run(runs, None)
    (folder / "run.yaml").write_text(json.dumps({**RUN, "cluster": {"nodes": "2"}}))
    lock = lock_run_folder(folder)
    signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(pid))
    Path(folder / "run.lock").write_text("1 login2\n")
    error = hpctrain("cancel", "gpt").exception
    assert isinstance(error, InputError)
    assert "process 1 on login2 holds it; run `hpctrain cancel" in str(error)
    assert signals == []
    lock.release()
