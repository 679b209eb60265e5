"""`--json`: what a program reads from each command that shows or stops runs, or prints texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import event, submitted_run

from hpctrain.base.errors import InputError
from hpctrain.base.output_streams import format_timestamp


def values(result) -> list[dict]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_cancel_names_the_runs(fake, runs, hpctrain):
    folder = submitted_run(runs, fake.submit("--nodes=2", "--hold"))
    (answer,) = values(hpctrain("cancel", "gpt", "--json"))
    (row,) = answer["runs"]
    assert (row["name"], row["folder"], row["cancelled"]) == ("gpt", str(folder), True)
    assert row["reason"].startswith("job 1 cancelled")


def test_logs_are_an_object_a_line(runs, hpctrain):
    folder = submitted_run(runs, "7")
    lines = [(8.0, "first \x1b[31m"), (9.5, "second")]
    (folder / "logs" / "7.n1.agent.log").write_text("".join(f"{format_timestamp(at)}{text}\n" for at, text in lines))
    assert values(hpctrain("logs", "7", "--json")) == [
        {"time_s": at, "source": "7.n1.agent", "text": text} for at, text in lines
    ]


def test_watch_prints_events_steps_and_states(fake, runs, hpctrain):
    submitted_run(runs, "1", event("attempt_started", -1, "attempt 0", nodes=["gpu1"]), event("finished", step=10))
    shown = values(hpctrain("watch", "gpt", "--json"))
    assert [list(value) for value in shown] == [["event"], ["event"], ["status"]]
    assert [value["event"]["kind"] for value in shown[:2]] == ["attempt_started", "finished"]
    assert (shown[2]["status"]["state"], shown[2]["status"]["steps"]) == ("done", 10)


def test_docs_are_listed_and_printed(hpctrain):
    (listed,) = values(hpctrain("docs", "--json"))
    assert {"name": "following-a-run", "title": "Following a run"} in listed["pages"]
    (page,) = values(hpctrain("docs", "following-a-run", "--json"))
    assert page["name"] == "following-a-run"
    assert page["text"].startswith("# Following a run")


def test_an_image_that_would_be_built_is_its_definition(hpctrain):
    (answer,) = values(hpctrain("image", "build", "--base", "cpu-small", "--dry-run", "--json"))
    assert answer["definition"] == hpctrain("image", "build", "--base", "cpu-small", "--dry-run").stdout


def test_a_report_is_named(runs, hpctrain):
    folder = submitted_run(runs, "1", event("finished", step=10))
    assert values(hpctrain("report", "gpt", "--json")) == [{"report": str(folder / "report.html")}]
    assert Path(folder / "report.html").exists()


@pytest.mark.parametrize("verb", ["status", "watch", "logs", "cancel", "report", "compare"])
def test_an_error_leaves_stdout_empty_and_is_one_line(runs, hpctrain, verb):
    failed = hpctrain(verb, "nosuch", "--json")
    assert failed.exit_code != 0
    assert failed.stdout == ""
    text = str(failed.exception) if isinstance(failed.exception, InputError) else failed.stderr.splitlines()[-1]
    assert "nosuch" in text
    assert "\n" not in text
