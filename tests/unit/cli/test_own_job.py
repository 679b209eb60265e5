"""`submit --own-job`: a batch job submitted by hand becomes the run's job, and finds its run when it comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.cli.commands import resubmit
from hpctrain.jobs.successors import CANCELLED_FILE
from hpctrain.launch.preflight.prepare import PreparedRun
from hpctrain.launch.slurm_job.job_script import is_in_allocation
from hpctrain.records.run.run import read_run
from hpctrain.runs.locate import job_id, record_job


@pytest.fixture
def job(fake, runs, monkeypatch):
    """Inside job 1, on its first node."""
    number = fake.submit("--nodes=2")
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield number
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run_file(monkeypatch, tmp_path):
    """A run file whose data is not looked at."""

    def prepared(given, runner, queued):
        run = given.run()
        return PreparedRun(run, run.spec(), [], None, None)

    monkeypatch.setattr("hpctrain.cli.commands.submit.prepare", prepared)
    monkeypatch.setattr("hpctrain.cli.commands.submit.check_provisional", lambda *args: [])
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    return str(path)


def test_the_job_becomes_the_run(fake, runs, job, hpctrain, run_file):
    assert hpctrain("submit", run_file, "--own-job", "--set", "cluster.nodes=2").exit_code == 7
    (folder,) = runs.iterdir()
    assert fake.argvs[-1] == ("bash", str(folder / "job.sh"))
    assert fake.envs[-1]["SLURM_JOB_ID"] == job
    assert job_id(folder) == job
    assert not is_in_allocation(folder)
    script = (folder / "job.sh").read_text()
    assert "--again same_job >&2" in script
    assert "#SBATCH" not in script
    assert "sbatch" not in [argv[0] for argv in fake.argvs if argv[1:] != ("--version",)][1:]


def test_a_job_that_comes_back_goes_on_in_its_folder(fake, runs, job, hpctrain, run_file, monkeypatch):
    hpctrain("submit", run_file, "--own-job")
    (folder,) = runs.iterdir()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Path(run_file).write_text("steps: [")  # edited meanwhile: the run has its own copy
    assert hpctrain("submit", run_file, "--own-job").exit_code == 7
    assert list(runs.iterdir()) == [folder]
    assert fake.argvs[-1] == ("bash", str(folder / "job.sh"))
    assert (folder / "job_id").read_text() == f"{job}\n"


def test_another_run_of_that_number_is_not_taken_at_a_first_start(fake, runs, job, hpctrain, run_file):
    old = submitted_run(runs, job, name="old-20250101T000000Z-00ff")
    hpctrain("submit", run_file, "--own-job")
    assert fake.argvs[-1] != ("bash", str(old / "job.sh"))
    assert len(list(runs.iterdir())) == 2


def test_a_job_that_was_stopped_before_it_made_its_folder_starts_anew(fake, runs, job, hpctrain, run_file, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert hpctrain("submit", run_file, "--own-job").exit_code == 7
    assert len(list(runs.iterdir())) == 1


def test_a_new_job_goes_on_with_a_run_that_ended(fake, runs, job, hpctrain, monkeypatch):
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, event("failed", reason="no node left"))
    (folder / CANCELLED_FILE).touch()
    new = fake.submit("--nodes=1")
    monkeypatch.setenv("SLURM_JOB_ID", new)
    assert hpctrain("resubmit", "gpt", "--own-job").exit_code == 7
    assert fake.argvs[-1] == ("bash", str(folder / "job.sh"))
    assert job_id(folder) == new
    assert not (folder / CANCELLED_FILE).exists()
    # Back from the queue, the run is its own and nobody is asked.
    asked = len(fake.argvs)
    assert hpctrain("resubmit", "gpt", "--own-job").exit_code == 7
    assert len(fake.argvs) == asked + 1


def test_who_waits_for_the_run_waits_for_this_job(fake, runs, job, hpctrain, monkeypatch):
    folder = submitted_run(runs, job, event("failed", reason="no node left"))
    follower = submitted_run(runs, None, name="follower-20260101T000001Z-00ff")
    waits = {**RUN, "cluster": {**RUN["cluster"], "after": [str(folder)]}}
    (follower / "run.yaml").write_text(json.dumps(waits))
    (folder / "followers").write_text(f"{follower}\n")
    record_job(follower, fake.submit("--nodes=1", f"--dependency=afterok:{job}"))
    fake.finish(job, code=1)
    new = fake.submit("--nodes=1")
    monkeypatch.setenv("SLURM_JOB_ID", new)
    result = hpctrain("resubmit", "gpt", "--own-job")
    assert result.exit_code == 7
    assert fake.jobs[2].dependency == f"afterok:{new}"
    assert f"{follower.name} (job 2) waits for job {new}" in result.stderr


def test_own_job_waits_for_nobody(fake, runs, job, hpctrain, run_file):
    result = hpctrain("submit", run_file, "--own-job", "--set", "cluster.after=other")
    assert result.exit_code == 7, result.exception
    assert "cluster.after: not waited for, as this job runs already" in result.stderr
    (folder,) = runs.iterdir()
    assert read_run(folder / "run.yaml").cluster.after == []


def test_a_run_whose_job_lives_is_not_taken_from_it(fake, runs, job, hpctrain, monkeypatch):
    submitted_run(runs, job, event("failed", reason="cut off"))
    monkeypatch.setenv("SLURM_JOB_ID", fake.submit("--nodes=1"))
    error = hpctrain("resubmit", "gpt", "--own-job").exception
    assert isinstance(error, InputError)
    assert f"its job {job} is running still" in str(error)
    fake.away = True
    assert isinstance(hpctrain("resubmit", "gpt", "--own-job").exception, RefusedError)


@pytest.mark.parametrize("verb", [["submit", "run.yaml"], ["resubmit", "gpt"]])
def test_outside_a_job_it_is_refused(fake, runs, hpctrain, run_file, verb):
    submitted_run(runs, "5", event("failed"))
    error = hpctrain(*verb, "--own-job").exception
    assert isinstance(error, InputError)
    assert "only inside a batch job" in str(error)


def test_a_local_run_is_refused(fake, runs, job, hpctrain, run_file):
    error = hpctrain("submit", run_file, "--own-job", "--set", "cluster.kind=local").exception
    assert isinstance(error, InputError)
    assert "add --set cluster.kind=slurm" in str(error)
    assert not runs.exists()


PREEMPTED_EARLY = """
import os, signal
from hpctrain.base.process import SystemRunner
from hpctrain.cli.commands.resubmit import begin_own_job
begin_own_job()
os.kill(os.getpid(), signal.SIGTERM)
SystemRunner().replace_process(["bash", "-c", "trap 'echo heard' TERM; kill $$; sleep 0.1"], os.environ)
"""


def test_a_preemption_before_the_script_runs_does_not_end_the_job():
    """The script itself hears of it again: bash cannot trap what was ignored when it started."""
    env = {**os.environ, "SLURM_JOB_ID": "7", "PYTHONPATH": str(Path(resubmit.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PREEMPTED_EARLY], capture_output=True, text=True, env=env, check=False)
    assert (done.stdout, done.returncode) == ("heard\n", 0)
