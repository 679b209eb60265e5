"""A run on a newer Slurm than this machine's own: submitted, preempted, back, left; beside it, a lost node's job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_text import prepare_text
from submitted import ENDLESS

from hpctrain.base.process import SystemRunner
from hpctrain.records.history.run_log import read_metrics
from hpctrain.slurm.commands import Slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("slurm", "lab"),
    pytest.mark.slurms("next"),
    pytest.mark.timeout(900),
]

RUN = {
    "adapt": {"mode": "off"},  # measured times of a busy machine change no plan
    "name": "newer",
    "steps": ENDLESS,
    "seed": 3,
    "cluster": {"kind": "slurm", "partition": "low", "nodes": "1", "time": "20", "device": "cpu",
                "nodelist": "node0", "exclusive": True},
    "model": {"dims": {"layers": 2, "dim": 32, "heads": 2}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 4},
    "checkpoint": {"every": 1000, "keep": 2},
    "validation": {"batches": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("newer")
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


def test_a_preempted_run_goes_on_and_a_lost_nodes_job_is_requeued(cluster, project: Path) -> None:
    slurm = Slurm(SystemRunner(), cluster.env)
    assert slurm.config()["version"] >= "24.11"

    def hpctrain(*words: str) -> str:
        argv = [sys.executable, "-m", "hpctrain", *words]
        done = subprocess.run(
            argv, cwd=project, env=cluster.env, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    lone = ("--parsable", "--requeue", "--nodelist=node3", "--output=/dev/null", "--wrap", "sleep 300")
    lost = cluster.run("sbatch", *lone).stdout.strip()
    cluster.wait(lambda: slurm.job(lost).state == "RUNNING", 30, "the lone job runs")
    cluster.kill("node3")
    # The lost node is given up when the run is over; until then a busy one is not.
    with cluster.slow_to_give_up():
        told = json.loads(hpctrain("submit", "run.yaml", "--json"))
        folder, first = Path(told["folder"]), told["job_id"]

        def steps() -> list[int]:
            return [row.step for row in read_metrics(folder / "metrics.jsonl")]

        cluster.wait(lambda: len(steps()) > 10, 90, "the run trains")
        assert json.loads(hpctrain("status", told["name"], "--json"))["state"] == "running"
        preempting = ("--partition=high", "--nodelist=node0", "--exclusive", "--output=/dev/null")
        cluster.run("sbatch", *preempting, "--wrap", "sleep 2")
        attempts = folder / "attempts.jsonl"

        def classes() -> list[str]:
            lines = [json.loads(line) for line in attempts.read_text().splitlines()]
            return [line.get("class", "runs") for line in lines]

        cluster.wait(lambda: slurm.job(first).state == "PREEMPTED", 120, attempts.read_text)
        cluster.wait(lambda: classes() == ["resumable", "runs"], 120, attempts.read_text)
        assert slurm.job(first).restarts == 0
        saved = steps()[-1]
        cluster.wait(lambda: steps()[-1] > saved + 10, 120, attempts.read_text)
        hpctrain("cancel", told["name"])
        # The notice was enough to save, and the next job did not wait for the first one to come back.
        assert steps() == list(range(1, steps()[-1] + 1))
        assert json.loads(hpctrain("status", told["name"], "--json"))["state"] == "cancelled"
    cluster.wait(lambda: slurm.job(lost).restarts == 1, 60, "Slurm gives the lost node up")
    assert slurm.job(lost).is_waiting
    # sinfo goes on calling it mixed, until somebody looks at it with scontrol.
    assert "State=DOWN" in cluster.run("scontrol", "show", "node", "node3").stdout
