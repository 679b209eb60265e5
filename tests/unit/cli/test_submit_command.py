"""`hpctrain submit`: what is left behind, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import RUN

from hpctrain.base.errors import CommandError, StorageError
from hpctrain.launch import submission
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.training import Prepared
from hpctrain.records.run import Run, read_run


@pytest.fixture
def run_file(monkeypatch, tmp_path):
    """A run file whose data is not looked at."""
    monkeypatch.setattr("hpctrain.cli.submit.prepare", _prepared)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    return path


def _prepared(path, overrides, count, topology, plan, queued=False):
    run = read_run(path, overrides)
    return Prepared(run, run.spec(), [], None, None)


@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_a_refused_submission_leaves_no_run(fake, runs, hpctrain, run_file, monkeypatch, kind):
    def refuse(*args):
        raise CommandError("sbatch refused the job: Invalid account")

    monkeypatch.setattr("hpctrain.cli.submit.submit_job", refuse)
    monkeypatch.setattr("hpctrain.cli.submit.submit_local", refuse)
    result = hpctrain("submit", str(run_file), "--set", f"cluster.kind={kind}")
    assert "Invalid account" in str(result.exception)
    assert list(runs.iterdir()) == []


def test_a_job_whose_id_cannot_be_written_is_ended(tmp_path: Path, monkeypatch) -> None:
    ended = []

    class Job:
        job_id = "7"

        def cancel(self, check: bool) -> None:
            ended.append(self.job_id)

    class Executor:
        def __init__(self, *args: object) -> None:
            pass

        def submit(self, *args: object) -> Job:
            return Job()

    def full(folder: Path, job: str) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(submission, "ScriptExecutor", Executor)
    monkeypatch.setattr(submission, "record_job", full)
    with pytest.raises(StorageError):
        submission.submit_job(RunFolder(tmp_path), Run.from_json(RUN))
    assert ended == ["7"]
