"""`list`, `logs`, `status`, `cancel`: looking at runs, and stopping them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.errors import InputError
from hpctrain.base.output_streams import format_timestamp
from hpctrain.runs.folder import lock_run_folder
from hpctrain.runs.locate import record_job


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


def test_a_machine_that_knows_no_cluster_says_so(fake, runs, hpctrain, monkeypatch, tmp_path):
    submitted_run(runs, "1")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    reason = json.loads(hpctrain("status", "gpt", "--json").stdout)["reason"]
    assert f"Slurm was not asked: SLURM_CONF: {tmp_path}/slurm.conf: there is no such file" in reason
    assert "load the site's Slurm module" in reason
    assert fake.argvs == []


def test_a_run_whose_agents_gave_up_is_not_over_before_its_job_is(fake, runs, hpctrain):
    submitted_run(runs, fake.submit("--nodes=2"), event("failed", reason="no node left"))
    told = json.loads(hpctrain("status", "gpt", "--json").stdout)
    assert (told["state"], told["reason"]) == ("recovering", "no node left; its job 1 is running still")
    fake.finish("1", code=1)
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "failed"


WHY = "Slurm could not start the step (srun: Unable to create step for job 7: Invalid node); back to the queue"


def test_why_an_attempt_ended_stands_wherever_one_looks(fake, runs, hpctrain):
    """What Slurm did to it is in the ledger alone: no agent was left to write an event."""
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job, event("attempt_started", -1, "attempt 0 on 2 nodes", nodes=["gpu1", "gpu2"]))
    first = {"attempt": 0, "job_id": "0", "start": 0.0, "end": 9.0, "class": "infrastructure", "reason": WHY}
    (folder / "attempts.jsonl").write_text(json.dumps(first) + "\n")
    words = f"attempt 0 ended (infrastructure): {WHY}"
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["last_end"] == words
    assert f"  {words}\n" in hpctrain("status", "gpt").stdout
    fake.finish(job, code=1)
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "failed"
    assert WHY in hpctrain("list").stdout
    assert WHY in json.loads(hpctrain("list", "--json").stdout)[0]["reason"]
    watched = hpctrain("watch", "gpt")
    assert watched.exit_code == 1
    assert watched.stdout.count(words) == 1
    (folder / "attempts.jsonl").write_text(json.dumps({**first, "class": "done"}) + "\n")
    assert "last_end" not in json.loads(hpctrain("status", "gpt", "--json").stdout)


@pytest.mark.parametrize("words", [("status",), ("watch",), ("watch", "--json"), ("logs", "-f")])
def test_attempts_that_cannot_be_read_are_one_line(fake, runs, hpctrain, words):
    folder = submitted_run(runs, fake.submit("--nodes=2"), event("failed", reason="no node left"))
    (folder / "attempts.jsonl").mkdir()
    refused = hpctrain(*words, "gpt").exception
    assert str(refused) == (
        f"{folder.resolve() / 'attempts.jsonl'}: is a folder, expected a regular file; give a file in it"
    )
    assert refused.exit_code == 2


def test_a_waiting_run_tells_why_and_what_to_do(fake, runs, hpctrain):
    job = fake.submit("--nodes=2", "--hold")
    submitted_run(runs, job)
    told = json.loads(hpctrain("status", job, "--json").stdout)
    assert (told["state"], told["job_state"], told["needs_action"]) == ("queued", "PENDING", True)
    assert f"scontrol release {job}" in told["reason"]
    assert "it stays in the queue until somebody does that" in hpctrain("status", job).stdout
    fake.jobs[int(job)] = replace(fake.jobs[int(job)], reason="Priority", start_s=int(time.time()) + 7200)
    told = json.loads(hpctrain("status", job, "--json").stdout)
    assert "needs_action" not in told
    assert told["expected_start_s"] == fake.jobs[int(job)].start_s
    assert "Slurm expects to start it in" in hpctrain("status", job).stdout


COMPLETED = "1|COMPLETED|0:0|gpu1|1|2|3|10|low|None"


@pytest.mark.parametrize("state", ["COMPLETED", "TIMEOUT", "UNHEARD_OF", None])
def test_what_nobody_remembers_as_done_is_never_done(fake, runs, hpctrain, state):
    submitted_run(runs, "1", event("generation_started", members=["gpu1"]))
    if state is not None:
        fake.accounting = COMPLETED.replace("COMPLETED", state).replace("|", "\x1f") + "\n"
    told = json.loads(hpctrain("status", "1", "--json").stdout)
    assert told["state"] == "failed"
    known = state in ("COMPLETED", "TIMEOUT")
    assert (f"ended: {state}" if known else "Slurm knows the job no more") in told["reason"]


def test_accounting_is_not_asked_where_the_files_tell_the_end(fake, runs, hpctrain):
    submitted_run(runs, "1", event("failed", reason="no node left"))
    assert "no node left" in hpctrain("status", "1").stdout
    assert "sacct" not in [argv[0] for argv in fake.argvs]


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
    assert {line.split()[2] for line in result.stdout.splitlines()} == set(expected.split())


def test_an_event_in_a_log_is_told_in_words_and_json_of_others_as_it_is(runs, hpctrain):
    folder = submitted_run(runs, "7")
    said = [event("checkpoint_saved", step=20, seconds=0.13, size_bytes=2048).to_json(), {"schema": "other/v1"}]
    texts = [*map(json.dumps, said), json.dumps(said[0])[:80]]
    (folder / "logs" / "7.n1.agent.log").write_text("".join(f"{format_timestamp(8.0)}{text}\n" for text in texts))
    shown = [line.partition(" | ")[2] for line in hpctrain("logs", "7").stdout.splitlines()]
    assert shown == ["checkpoint of step 20 saved in 130 ms (2.0 KiB)", *texts[1:]]


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
    lock.close()


def test_the_log_of_a_rank_is_that_of_the_worker_which_it_was(runs, hpctrain):
    """Rank 0 is on n1 at first, on n2 when n1 is lost; the logs of both hold what other ranks printed too."""
    folder = submitted_run(runs, "7")
    times = {"plan-0.json": 100.0, "plan-1.json": 200.0}
    with (folder / "events.jsonl").open("w") as file:
        for number, (plan, time_s) in enumerate(times.items()):
            start = event("generation_started", number, plan=plan).model_copy(update={"time_s": time_s})
            file.write(json.dumps(start.to_json()) + "\n")
    for plan, ranks in (("plan-0.json", ["n1:cpu0", "n2:cpu0"]), ("plan-1.json", ["n2:cpu0", "n2:cpu1"])):
        replicas = [{"rows": 8, "micro_batch": 1, "micro_batches": 8, "devices": [[ranks[0]], [ranks[1]]]}]
        stages = [{"layers": [0, 1]}, {"layers": [1, 2]}]
        (folder / plan).write_text(
            json.dumps({"pp": 2, "dp": 1, "tp": 1, "stages": stages, "replicas": replicas, "ranks": ranks})
        )
    (folder / "logs" / "0").mkdir()
    for name, lines in {"n1.0": [(101, "a")], "n2.0": [(102, "b"), (201, "c")], "n2.1": [(202, "d")]}.items():
        text = "".join(f"{format_timestamp(time_s)}{word}\n" for time_s, word in lines)
        (folder / "logs" / "0" / f"{name}.log").write_text(text)

    def printed(rank: str) -> list[str]:
        return [line[-1] for line in hpctrain("logs", "gpt", "--rank", rank).stdout.splitlines()]

    assert (printed("0"), printed("1")) == (["a", "c"], ["b", "d"])
    assert "the run's plans have ranks 0 to 1" in str(hpctrain("logs", "gpt", "--rank", "2").exception)


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_cancelling_at_once_says_what_is_kept(fake, runs, hpctrain, state):
    if state == "waiting":
        fake.submit("--nodes=3")
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job)
    result = hpctrain("cancel", "gpt", "--now")
    assert result.stdout == f"job {job} cancelled; it was {state}; there is no checkpoint yet, nothing was saved\n"
    assert (folder / "cancelled").exists()
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "cancelled"
