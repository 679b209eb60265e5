"""What is known and asked before a job is queued, on a real Slurm: partition, start, kinds of nodes, waits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hostile import lay_traps
from real_text import prepare_text

from hpctrain.base.module_argv import program

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]

RUN = {
    "name": "first",
    "steps": 3,
    "cluster": {"kind": "slurm", "time": "20", "device": "cpu"},
    "model": {"dims": {"layers": 2, "dim": 32, "heads": 2}},
    "data": {"train": ["data"], "seq_len": 32},
    "batch": {"global": 8},
    "validation": {"batches": 0},
}

Hpctrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("submission")
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture
def hpctrain(cluster, project: Path) -> Hpctrain:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hpctrain", *words]
        env = {**cluster.env, "XDG_CONFIG_HOME": str(project)}
        return subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=800, check=False)

    return run


@pytest.fixture
def kinds(cluster) -> Iterator[dict[str, set[str]]]:
    """Two kinds of nodes."""
    kinds = {"a100": {"node0", "node1"}, "v100": {"node2", "node3"}}
    for name, nodes in kinds.items():
        cluster.run("scontrol", "update", f"NodeName={','.join(nodes)}", f"AvailableFeatures={name}")
    yield kinds
    cluster.run("scontrol", "update", "NodeName=ALL", "ActiveFeatures=")


def test_one_step_on_two_kinds_of_nodes_and_a_run_that_waits_for_it(
    cluster, hpctrain: Hpctrain, kinds: dict[str, set[str]]
) -> None:
    groups = "cluster.groups=[{constraint: a100, nodes: 1}, {constraint: v100, nodes: 1}]"
    done = hpctrain("submit", "run.yaml", "--json", "--set", groups)
    assert done.returncode == 0, done.stderr
    assert "partition high chosen" in done.stderr
    assert "next best: low: without GPUs, enough nodes are free now, jobs may be preempted" in done.stderr
    assert "Slurm expects to start it at once" in done.stderr
    first = json.loads(done.stdout)
    done = hpctrain("submit", "run.yaml", "--json", "--set", "name=second", "--set", "cluster.after=first")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)["job_id"]
    assert cluster.job(second)["Reason"] == "Dependency"
    attempts = Path(first["folder"]) / "attempts.jsonl"
    cluster.wait(lambda: attempts.exists() and '"code"' in attempts.read_text(), 120, "the first run has ended")
    attempt = json.loads(attempts.read_text())
    assert attempt["code"] == 0, attempt
    assert [len(set(attempt["nodes"]) & nodes) for nodes in kinds.values()] == [1, 1]
    cluster.wait(lambda: cluster.job(second)["JobState"] == "RUNNING", 30, "the second run has started")


def test_a_run_follows_the_one_it_waits_for_to_its_next_job(cluster, hpctrain: Hpctrain) -> None:
    """Slurm holds a job for good whose dependency failed; the new job of that run frees it."""
    held = ("--set", "cluster.sbatch=[--hold]")
    first = json.loads(hpctrain("submit", "run.yaml", "--json", "--set", "name=held", *held).stdout)
    done = hpctrain("submit", "run.yaml", "--json", "--set", "name=follower", "--set", "cluster.after=held")
    follower = json.loads(done.stdout)["job_id"]
    assert hpctrain("cancel", "held").returncode == 0
    cluster.wait(lambda: cluster.job(follower)["Reason"] == "DependencyNeverSatisfied", 60, "Slurm has noticed")
    done = hpctrain("resubmit", "held", "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)["job_id"]
    assert again != first["job_id"]
    assert cluster.job(follower)["Dependency"].startswith(f"afterok:{again}(")
    cluster.wait(lambda: cluster.job(follower)["Reason"] == "Dependency", 60, "it waits again")


def test_a_job_imports_nothing_from_the_folder_that_it_was_submitted_from(
    cluster, project: Path, tmp_path: Path
) -> None:
    """sbatch starts the script, and srun its tasks, in that folder."""
    here, caught = tmp_path / "here", tmp_path / "caught"
    lay_traps(here, caught)
    words = ["submit", str(project / "run.yaml"), "--json", "--set", f"data.train=[{project}/data]"]
    argv = [*program("hpctrain"), *words, "--set", "cluster.nodes=2"]
    env = {**cluster.env, "HPCTRAIN_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(argv, cwd=here, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    job, folder = (json.loads(done.stdout)[key] for key in ("job_id", "folder"))
    script = Path(folder, "job.sh").read_text()
    assert cluster.run("scontrol", "write", "batch_script", job, "-").stdout.rstrip("\n") == script.rstrip("\n")
    attempts = Path(folder, "attempts.jsonl")
    cluster.wait(lambda: attempts.exists() and '"code"' in attempts.read_text(), 120, "the run has ended")
    assert json.loads(attempts.read_text())["code"] == 0
    assert not caught.exists(), caught.read_text()


def test_what_slurm_refuses_is_told_in_its_words_and_leaves_nothing(hpctrain: Hpctrain, project: Path) -> None:
    before = sorted(project.glob("runs/*"))
    done = hpctrain("submit", "run.yaml", "--set", "cluster.reservation=nosuch")
    assert done.returncode == 4
    assert "sbatch --test-only refuses the job: allocation failure: Requested reservation is invalid" in done.stderr
    assert sorted(project.glob("runs/*")) == before


def test_slurms_options_are_those_of_sbatch(hpctrain: Hpctrain) -> None:
    words = "-p low -t 2:00:00 -N 2 -w node[1-2] -x node0 -J named"
    done = hpctrain("submit", "run.yaml", "--dry-run", "--json", *words.split())
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["script"].splitlines()
    asked = {"--partition=low", "--time=2:00:00", "--nodes=2", "--nodelist='node[1-2]'", "--exclude=node0"}
    assert {f"#SBATCH {option}" for option in (*asked, "--job-name=named")} <= set(lines)
    assert "Slurm expects to start it at once on node[1-2]" in done.stderr
    done = hpctrain("submit", "run.yaml", "--dry-run", "-p", "low", "-N2", "-w", "node1")
    assert done.returncode == 0, done.stderr
    assert "start it at once, not counting the time until the nodes of cluster.nodelist are free" in done.stdout
