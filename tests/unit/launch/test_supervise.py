"""How a local attempt ended, from its processes and their last words."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_clock import FakeClock
from run_folders import event, submitted_run

from hpctrain.launch.local_run import LocalJob
from hpctrain.report.status import read_status
from hpctrain.runs.folder import RunFolder


class FakeProcess:
    """A node process that runs until it is told otherwise."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def terminate(self) -> None:
        self.code = 75

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.code


@pytest.fixture
def job(tmp_path: Path) -> LocalJob:
    folder = RunFolder(submitted_run(tmp_path, None, event("generation_started", members=["local0"])))
    run_file = folder.path / "run.yaml"
    run_file.write_text(run_file.read_text().replace("slurm", "local"))
    attempt = folder.begin_attempt(["local0", "local1"], 0.0)
    job = LocalJob(folder, attempt, FakeClock())
    job.processes |= {"local0": FakeProcess(), "local1": FakeProcess()}
    return job


def test_a_run_that_was_ended_at_once_is_cancelled_not_failed(job):
    job.stop()
    job.kill()
    ended = job.wait(lambda: None)
    assert (ended.exit_code, ended.stopped) == (1, True)
    status = read_status(job.folder.path, 1_795_000_001.0)
    assert (status.state, status.reason) == ("cancelled", ended.reason)
    assert ended.reason == "ended at once on request; there is no checkpoint yet, nothing was saved"


def test_processes_that_somebody_else_killed_are_a_failure(job):
    for process in job.processes.values():
        process.kill()
    assert not job.wait(lambda: None).stopped
    assert read_status(job.folder.path, 1_795_000_001.0).state == "failed"


def test_a_run_that_was_done_before_it_was_ended_is_done(job):
    job.processes["local0"].code = 0
    job.kill()
    assert job.wait(lambda: None).exit_code == 0
