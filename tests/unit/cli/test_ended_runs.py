"""`list` reads the files of ended runs once; what it remembers of them can be damaged, stale or somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.records.history.run_log import MetricRow
from hpctrain.runs.folder import lock_run_folder

START_S = 1_795_000_000.0


def metric(step: int, loss: float) -> str:
    row = MetricRow(
        step=step, generation=0, time_s=START_S + step, step_time_s=1.0, loss=loss, lr=1e-3, tokens=8, samples=8,
        tokens_per_s=8.0, bytes_sent={"dp": 0}, stage_time_s=[0.5], micro_batches=[1],
    )  # fmt: skip
    return json.dumps(row.to_json()) + "\n"


@pytest.fixture
def ended(fake, runs) -> Path:
    """A run on two nodes that is done after 10 steps and half an hour."""
    folder = submitted_run(runs, "1", event("finished", step=10))
    (folder / "metrics.jsonl").write_text(metric(9, 3.5) + metric(10, 3.25))
    attempt = {"attempt": 0, "job_id": "1", "start": START_S, "end": START_S + 1800, "nodes": ["gpu1", "gpu2"]}
    (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    return folder


@pytest.fixture
def remembered(state_home: Path) -> Path:
    """The file with what is remembered."""
    return state_home / "hpctrain" / "ended_runs.json"


@pytest.fixture
def rows(hpctrain):
    return lambda: json.loads(hpctrain("list", "--json").stdout)


@pytest.fixture
def never_read(monkeypatch):
    """From now on, a run whose files are read is an error of the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("the files were read again")

    return lambda: monkeypatch.setattr("hpctrain.jobs.run_status.read_status", refuse)


def without_age(rows):
    return [{key: value for key, value in row.items() if key != "last_sign_s"} for row in rows]


def test_list_and_status_show_loss_age_and_cost(ended, hpctrain, rows):
    (row,) = rows()
    assert (row["step"], row["loss"], row["node_hours"], row["gpu_hours"]) == (10, 3.25, 1.0, None)
    assert row["last_sign_s"] >= 0
    shown = hpctrain("list").stdout.split()
    assert [shown[0], shown[1], shown[2]] == ["done", "10/10", "3.2500"]
    assert shown[-3:] == ["1", "node-h", str(ended)]
    assert "cost 1 node-h" in hpctrain("status", "gpt").stdout


def test_gpu_hours_are_those_of_the_named_devices(ended, rows):
    (ended / "run.yaml").write_text(json.dumps({**RUN, "cluster": {**RUN["cluster"], "devices_per_node": 4}}))  # type: ignore[dict-item]
    assert rows()[0]["gpu_hours"] == 4.0


def test_files_of_an_ended_run_are_read_once(ended, rows, never_read):
    first = rows()
    never_read()
    assert without_age(rows()) == without_age(first)


def test_a_run_that_failed_is_read_once_and_slurm_is_asked_each_time(fake, runs, rows, never_read):
    job = fake.submit("--nodes=2")
    submitted_run(runs, job, event("failed", reason="no node left").model_copy(update={"time_s": 1.0}))
    assert rows()[0]["state"] == "recovering"
    never_read()
    fake.finish(job, code=1)
    assert rows()[0]["state"] == "failed"


@pytest.mark.parametrize(
    ("file", "text", "key", "expected"),
    [
        ("metrics.jsonl", metric(10, 2.5), "loss", 2.5),
        ("run.yaml", json.dumps({**RUN, "steps": 20}), "steps", 20),
        ("job_id", "1\n2\n", "job_id", "2"),
        ("attempts.jsonl", "", "node_hours", 0.0),
        ("events.jsonl", "", "state", "failed"),
    ],
)
def test_what_changes_in_an_ended_run_is_seen(ended, rows, file, text, key, expected):
    rows()
    before = (ended / file).stat()
    (ended / file).write_text(text)
    os.utime(ended / file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rows()[0][key] == expected


def test_a_file_that_others_may_write_to_is_not_trusted_from_memory(ended, rows):
    rows()
    (ended / "metrics.jsonl").chmod(0o666)
    assert "can be written by others" in rows()[0]["reason"]


def test_a_run_that_a_process_holds_or_that_wrote_just_now_is_read_each_time(fake, runs, rows, remembered):
    live = submitted_run(runs, None, event("attempt_started", -1))
    with lock_run_folder(live):
        assert rows()[0]["state"] == "starting"
    assert not remembered.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        json.dumps({"schema": "hpctrain.ended_runs/v0", "runs": []}),
        json.dumps({"schema": "hpctrain.ended_runs/v1", "runs": {"FOLDER": {"files": 1}}}),
        "older",
    ],
)
def test_damage_and_other_versions_are_ignored_and_replaced(ended, rows, remembered, text):
    expected = without_age(rows())
    if text == "older":  # a version whose statuses had other fields
        values = json.loads(remembered.read_text())
        values["runs"][str(ended)]["status"] = {"state": "running", "progress": 3}
        text = json.dumps(values)
    remembered.write_text(text)
    assert without_age(rows()) == expected
    assert json.loads(remembered.read_text())["runs"][str(ended)]["status"]["state"] == "done"


def test_what_others_may_write_to_is_neither_used_nor_written(ended, rows, remembered):
    expected = without_age(rows())
    forged = remembered.read_text().replace('"done"', '"failed"')
    remembered.write_text(forged)
    remembered.parent.chmod(0o777)
    assert without_age(rows()) == expected
    assert remembered.read_text() == forged


def test_a_list_needs_no_room_to_remember(ended, rows, remembered):
    remembered.mkdir(parents=True)
    assert rows()[0]["state"] == "done"
    remembered.rmdir()
    remembered.parent.rmdir()
    remembered.parent.write_text("")
    assert rows()[0]["state"] == "done"


def test_runs_that_are_gone_are_forgotten(ended, runs, rows, remembered):
    rows()
    ended.rename(runs / "other-20260102T000000Z-00ff")
    rows()
    assert [Path(name).name for name in json.loads(remembered.read_text())["runs"]] == ["other-20260102T000000Z-00ff"]


@pytest.mark.slow
def test_lists_at_the_same_time_leave_one_whole_file(ended, runs, remembered, repository):
    for number in range(20):
        submitted_run(runs, None, event("finished", step=10), name=f"gpt-20250101T0000{number:02d}Z-00ff")
    environ = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "hpctrain", "list", "--json"]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(3)]
    told = [json.loads(process.communicate()[0]) for process in several]
    assert [{row["state"] for row in rows} for rows in told] == [{"done"}] * 3
    assert len(json.loads(remembered.read_text())["runs"]) == 21
    assert [path.name for path in remembered.parent.iterdir()] == ["ended_runs.json"]
