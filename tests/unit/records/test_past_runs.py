"""The history of started runs: one line each, whatever happens to the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from hpctrain.base.errors import InputError, StorageError
from hpctrain.records.history.past_runs import PastRun, append_past_run, history_file, read_past_runs
from hpctrain.runs.locate import find_run


def past(folder: Path | str, job: str | None = "7", time_s: float = 1.0) -> PastRun:
    name = Path(folder).name.partition("-2")[0]
    return PastRun(time_s=time_s, verb="submit", name=name, folder=str(folder), job_id=job, cluster="alps")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def file(environ: dict[str, str]) -> Path:
    path = history_file(environ)
    assert path is not None
    return path


def run_at(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("steps: 1\n")
    return folder


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/anna"}, "/home/anna/.local/state/hpctrain/history.jsonl"),
        ({"HOME": "/home/anna", "XDG_STATE_HOME": "/state"}, "/state/hpctrain/history.jsonl"),
        ({"HOME": "/home/anna", "XDG_STATE_HOME": "rel"}, "/home/anna/.local/state/hpctrain/history.jsonl"),
        ({}, "None"),
    ],
)
def test_where_it_lies(environ, expected):
    assert str(history_file(environ)) == expected


def test_lines_come_back_in_order_and_only_their_owner_reads_them(environ, file):
    lines = [past("/a/gpt", "7"), past("/b/bert", None)]
    for line in lines:
        append_past_run(file, line)
    assert read_past_runs(environ) == lines
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_torn_line_and_one_of_another_version_are_left_out(environ, file):
    append_past_run(file, past("/a/gpt"))
    with file.open("a") as out:
        out.write(json.dumps({"schema": "hpctrain.past_run/v9"}) + '\n{"time_s": 1, "ve')
    append_past_run(file, past("/b/bert"))
    assert [line.folder for line in read_past_runs(environ)] == ["/a/gpt", "/b/bert"]


def test_a_line_that_could_be_torn_is_not_written(file):
    with pytest.raises(StorageError, match="too long"):
        append_past_run(file, past("/" + "x" * 5000))
    assert not file.exists()


def test_a_home_that_cannot_be_written_is_an_error_of_storage(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StorageError):
        append_past_run(tmp_path / "state" / "hpctrain" / "history.jsonl", past("/a/gpt"))


def test_a_run_is_found_from_anywhere(environ, file, tmp_path):
    old = run_at(tmp_path / "far" / "gpt-20260101T000000Z-0000")
    new = run_at(tmp_path / "far" / "gpt-20260201T000000Z-0000")
    for folder, job in ((old, "7"), (old, "8"), (new, "9")):
        append_past_run(file, past(folder, job))
    for name, folder in {"gpt": new, old.name: old, "7": old, "8": old, "9": new}.items():
        assert find_run(name, environ, tmp_path) == folder


def test_a_run_here_comes_first(environ, file, tmp_path):
    append_past_run(file, past(run_at(tmp_path / "far" / "gpt-20260201T000000Z-0000")))
    here = run_at(tmp_path / "runs" / "gpt-20260101T000000Z-0000")
    assert find_run("gpt", environ, tmp_path) == here


def test_a_run_that_was_removed_is_said_to_be_gone(environ, file, tmp_path):
    append_past_run(file, past(tmp_path / "far" / "gpt-20260201T000000Z-0000"))
    with pytest.raises(InputError, match=r"7: its run folder .*/far/gpt-20260201T000000Z-0000 is gone"):
        find_run("7", environ, tmp_path)
    with pytest.raises(InputError, match="no such run"):
        find_run("bert", environ, tmp_path)


@pytest.mark.requires("root")
def test_a_history_of_somebody_else_tells_nothing(environ: dict[str, str], file: Path, tmp_path: Path) -> None:
    append_past_run(file, past(run_at(tmp_path / "runs" / "gpt")))
    assert len(read_past_runs(environ)) == 1
    os.chown(file, 12345, 12345)
    assert read_past_runs(environ) == []
    file.unlink()
    os.mkfifo(file)
    assert read_past_runs(environ) == []
