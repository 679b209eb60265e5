"""What is said before a job is queued, and other ways of starting a run: in an allocation, here, not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from submitted import Project

from hpctrain.records.history.run_log import read_metrics
from hpctrain.records.run.run import read_run

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        ("cluster.partition=nowhere", 4, "nowhere"),
        ("cluster.nodes=9", 4, "9"),
        ("cluster={kind: slurm, nodes: 2, devices_per_node: 64, device: cuda}", 4, "64"),
        ("cluster.time=soon", 2, "cluster.time"),
        ("cluster.time='3'", 2, "cluster.save_notice_s"),
        ("cluster.sbatch=[--nodes=2]", 2, "--nodes is set by hpctrain"),
    ],
)
def test_what_the_cluster_does_not_have_is_said_before_submitting(
    project: Project, override: str, code: int, text: str
) -> None:
    done = project.hpctrain("submit", "run.yaml", "--set", override, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_an_account_that_may_not_use_the_partition(project: Project) -> None:
    project.cluster.run("scontrol", "update", "partition=low", "AllowAccounts=physics")
    try:
        done = project.hpctrain("submit", "run.yaml", "--set", "cluster.account=chemistry", check=False)
    finally:
        project.cluster.run("scontrol", "update", "partition=low", "AllowAccounts=ALL")
    assert done.returncode == 4, done.stderr
    assert "cluster.account: found 'chemistry'" in done.stderr
    assert "physics" in done.stderr


def test_inside_an_allocation_the_run_starts_there(project: Project) -> None:
    words = [sys.executable, "-m", "hpctrain", "submit", "run.yaml", "--topology", "topology.json", "--set", "steps=20"]
    done = subprocess.run(
        # More tasks than nodes: they are the person's, the run has an agent a node.
        ["salloc", "-p", "low", "-N3", "-n6", "-O", "--exclusive", *words],
        cwd=project.path, env=project.cluster.env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "run folder " in line)
    folder = Path(line.rpartition("run folder ")[2])
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 21))
    assert rows[0].placement is not None
    assert len({item.device.partition(":")[0] for item in rows[0].placement}) > 1


def test_a_controller_that_is_away_is_said_and_the_files_speak(project: Project) -> None:
    words = ("submit", "run.yaml", "--json", "--topology", "topology.json", "--wait", "--set", "steps=20")
    job = project.job(json.loads(project.hpctrain(*words, "--set", "cluster.nodes=1").stdout))
    assert job.status()["state"] == "done", job.explain()
    job.assert_whole(20)
    controller = project.cluster.controller()
    controller.suspend()
    try:
        (job.folder / "events.jsonl").write_text("")  # as if the job had just begun: the controller would be asked
        told = job.status()
    finally:
        controller.resume()
    assert "the Slurm controller does not answer" in str(told["reason"])
    assert told["step"] == 20


def test_a_local_run_is_not_started_in_the_background_where_slurm_is(project: Project) -> None:
    """Elsewhere it is: tests/train/test_hostile_folder.py."""
    before = sorted((project.path / "runs").glob("*"))
    done = project.hpctrain("submit", "run.yaml", "--json", "--set", "cluster.kind=local", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cluster.kind: found local on a machine with Slurm" in done.stderr
    assert sorted((project.path / "runs").glob("*")) == before


def test_what_init_writes_on_a_cluster_is_accepted_as_it_is(project: Project) -> None:
    done = project.hpctrain("init", "first.yaml", "--yes")
    assert done.stdout.splitlines()[-1] == "next: hpctrain submit first.yaml"
    cluster = read_run(project.path / "first.yaml").cluster
    # In `low`, jobs may be preempted.
    assert (cluster.kind, cluster.partition, cluster.nodes, cluster.time) == ("slurm", "high", "2", "00:25:00")
    dry = project.hpctrain("submit", "first.yaml", "--dry-run")
    assert "#SBATCH --partition=high\n" in dry.stdout
    assert "Slurm expects to start it" in dry.stdout
    assert "00:25:00" in dry.stdout


def test_a_dry_run_shows_the_script_and_submits_nothing(project: Project) -> None:
    before = project.cluster.run("squeue", "--noheader").stdout
    done = project.hpctrain("submit", "run.yaml", "--dry-run")
    assert "#SBATCH --partition=low" in done.stdout
    assert "provisional plan" in done.stdout or "not checked before the job starts" in done.stdout
    assert project.cluster.run("squeue", "--noheader").stdout == before


PROGRAM = """
from hpctrain import api

run = api.submit("run.yaml", settings={"name": "program", "steps": 6}, topology="topology.json")
status = api.wait(run, timeout_s=700)
print(status.state, status.step, status.reason)
print(run.metrics["step"].tolist(), run.job_id == run.attempts[0]["job_id"], len(run.plan.nodes) > 1)
"""


def test_a_program_submits_a_job_waits_for_it_and_reads_its_metrics(project: Project) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=project.path, env=project.cluster.env, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    state, metrics = done.stdout.splitlines()
    assert state.startswith("done 6 "), done.stderr
    assert metrics == "[1, 2, 3, 4, 5, 6] True True"
