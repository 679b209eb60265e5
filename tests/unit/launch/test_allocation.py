"""A run inside somebody's allocation: Ctrl-C reaches it, its files name the job while it runs, a cancel spares it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fake_clock import FakeClock
from run_folders import slurm_run

from hpctrain.base.process import Process, SystemRunner
from hpctrain.jobs.successors import is_cancelled
from hpctrain.launch.slurm_job.job_script import ALLOCATION, is_in_allocation, run_in_allocation, stop_in_allocation
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_id

RUN = slurm_run()


class Script:
    """job.sh: while it is waited for, the person presses Ctrl-C as often as it is told."""

    pid = 1

    def __init__(self, folder: Path, signals: list[int]) -> None:
        self.folder, self.signals = folder, signals
        self.terminated = 0
        self.job_ids: list[str | None] = []

    def terminate(self) -> None:
        self.terminated += 1

    def wait(self, timeout_s: float | None = None) -> int:
        self.job_ids.append(job_id(self.folder))
        for number in self.signals:
            os.kill(os.getpid(), number)
        return 75


class ScriptRunner(SystemRunner):
    def __init__(self, script: Script) -> None:
        self.script = script

    def start(self, argv, env=None, log=None, keep_fds=()) -> Process:
        return self.script  # type: ignore[return-value]


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_goes_to_the_script(tmp_path: Path, signals: list[int]) -> None:
    script, said = Script(tmp_path, signals), list[str]()
    before = signal.getsignal(signal.SIGINT)
    code = run_in_allocation(RunFolder(tmp_path), RUN, "7", ScriptRunner(script), said.append)
    assert code == 1
    assert script.terminated == len(said) == len(signals)
    assert said[0].startswith("saving a checkpoint and leaving")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_folder_names_the_job_while_it_is_used(tmp_path: Path) -> None:
    script = Script(tmp_path, [])
    run_in_allocation(RunFolder(tmp_path), RUN, "7", ScriptRunner(script), print)
    assert script.job_ids == ["7"]
    # Afterwards the allocation, which may go on for hours, says nothing about the run.
    assert job_id(tmp_path) is None
    assert not is_in_allocation(tmp_path)


def test_a_cancel_ends_the_run_and_not_the_allocation(tmp_path: Path) -> None:
    (tmp_path / ALLOCATION).write_text("7\n")
    clock = FakeClock(on_sleep=lambda _: (tmp_path / ALLOCATION).unlink() if clock.now() > 5 else None)
    assert stop_in_allocation(tmp_path, clock) == "the run has left its allocation, which goes on"
    assert is_cancelled(tmp_path)
    (tmp_path / ALLOCATION).write_text("7\n")
    assert "it has not within 90 s" in stop_in_allocation(tmp_path, FakeClock())
