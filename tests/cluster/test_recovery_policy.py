"""What follows an attempt on a real Slurm: a new job without the bad node, a queued successor, or the end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_text import prepare_text

from hpctrain.records.bad_node import read_bad_nodes
from hpctrain.records.event import read_events
from hpctrain.records.locate import job_id
from hpctrain.records.metric import effective, read_metrics
from hpctrain.records.successor import read_successors

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model"

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab")]

STEPS = 600
"""More than a busy machine does between a look at the steps and the loss of a node that follows it."""
RUN = {
    "name": "policy",
    "steps": STEPS,
    "seed": 3,
    "cluster": {"kind": "slurm", "partition": "low", "nodes": "2", "time": "20", "device": "cpu"},
    "model": {"dims": {"layers": 2, "dim": 32, "heads": 2}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every": 20, "keep": 2},
    "validation": {"batches": 0},
    "recovery": {"min_nodes": 2, "retries": 1},
}
ONE_NODE = ("cluster.nodes=1", "recovery.min_nodes=1", "recovery.successors=1")
DIVERGES = ("optimizer.lr=1e30", "optimizer.clip_norm=null", "optimizer.warmup_steps=0")


class Submitted:
    """A run on the lab."""

    def __init__(self, cluster, project: Path, *overrides: str) -> None:
        self.cluster, self.project = cluster, project
        words = [word for override in overrides for word in ("--set", override)]
        told = json.loads(self.hpctrain("submit", "run.yaml", "--json", "-t", "topology.json", *words))
        self.name, self.folder, self.job_id = told["name"], Path(told["folder"]), told["job_id"]

    def hpctrain(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", *words],
            cwd=self.project, env=self.cluster.env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self) -> str:
        return json.loads(self.hpctrain("status", self.name, "--json"))["state"]

    def attempts(self) -> list[dict[str, object]]:
        path = self.folder / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def successors(self) -> list[str]:
        return list(dict.fromkeys(item.job_id for item in read_successors(self.folder)))

    def first_nodes(self) -> list[str]:
        """The nodes of its first attempt, once there is one."""
        self.cluster.wait(self.attempts, 60, f"{self.name} has started")
        return [str(node) for node in self.attempts()[0]["nodes"]]

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait(lambda: len(read_metrics(self.folder / "metrics.jsonl")) >= step, 90, f"step {step}")

    def wait_for_end(self, state: str) -> None:
        over = ("done", "failed", "cancelled")
        self.cluster.wait(lambda: self.state() in over, 150, f"{self.name} has ended", self.cluster.status_every_s)
        assert self.state() == state, self.explain()
        self.cluster.wait(lambda: "end" in self.attempts()[-1], 60, "its script has ended")

    def explain(self) -> str:
        logs = [path.read_text()[-2000:] for path in sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join([json.dumps(self.attempts(), indent=1), *logs])

    def assert_whole(self) -> None:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row.step for row in effective(rows)] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture
def project(cluster, prepared: Path) -> Path:
    if not (prepared / "topology.json").exists():
        words = ["probe", "-N", "4", "-p", "low", "-o", "topology.json"]
        done = subprocess.run([sys.executable, "-m", "hpctrain", *words], cwd=prepared, env=cluster.env, check=False)
        # On a busy machine "go with warnings" will do.
        assert done.returncode in (0, 3)
    return prepared


@pytest.mark.timeout(1200)
def test_what_follows_an_attempt(cluster, project: Path) -> None:
    """Three runs at once: one loses a node it cannot do without, one that of its script, one fails by itself."""
    alone = Submitted(cluster, project)
    lost = alone.first_nodes()[-1]
    assert cluster.job(alone.job_id)["BatchHost"] != lost
    alone.wait_for_step(5)
    cluster.lab("kill", lost)

    fatal = Submitted(cluster, project, *ONE_NODE, "steps=50", *DIVERGES)
    # Nothing stands between its first steps and the loss of its node: it must not be done by then.
    chained = Submitted(cluster, project, *ONE_NODE)
    (successor,) = chained.successors()
    assert f"afterany:{chained.job_id}" in cluster.job(successor)["Dependency"]
    (script,) = chained.first_nodes()
    chained.wait_for_step(5)
    cluster.lab("kill", script)

    fatal.wait_for_end("failed")
    assert [line["class"] for line in fatal.attempts()] == ["fatal", "fatal"], fatal.explain()
    assert [line["job_id"] for line in fatal.attempts()] == [fatal.job_id, fatal.successors()[0]]
    assert "2 failures in a row without a new checkpoint" in str(fatal.attempts()[-1]["reason"])
    assert cluster.job(fatal.successors()[-1])["JobState"] == "CANCELLED"

    for run in (chained, alone):
        run.wait_for_end("done")
        run.assert_whole()
        assert [line["class"] for line in run.attempts()] == ["infrastructure", "done"], run.explain()
    # A new job that knows of the lost node, queued by the one that lost it.
    assert job_id(alone.folder) == alone.successors()[-1] == alone.attempts()[-1]["job_id"]
    assert [line.node for line in read_bad_nodes(alone.folder)] == [lost]
    assert cluster.job(alone.successors()[-1])["ExcNodeList"] == lost
    # Nothing was left to queue one: what waited took over, queued the next, and cancelled it when all was done.
    assert chained.attempts()[-1]["job_id"] == successor
    assert cluster.job(chained.successors()[-1])["JobState"] == "CANCELLED"


BROKEN = """

import os
from pathlib import Path

_FAILS = Path(os.environ["SLURM_SUBMIT_DIR"]) / "fails" if "SLURM_SUBMIT_DIR" in os.environ else Path("/nonexistent")


def touch_memory() -> None:
    if "RANK" in os.environ and _FAILS.exists() and _FAILS.read_text() == os.environ.get("SLURMD_NODENAME"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
"""A model that meets what torch raises on a GPU with bad memory, on the node whose name lies in a file."""


@pytest.mark.timeout(600)
def test_a_node_whose_gpu_fails_is_left_out_and_spends_no_retry(cluster, project: Path) -> None:
    shutil.copytree(EXAMPLE / "code", project / "code")
    code, forward = (
        project / "code" / "gpt.py",
        "    def forward(self, x: Tensor) -> Tensor:\n        x = x + self.dropout",
    )
    text = code.read_text()
    assert text.count(forward) == 1
    code.write_text(
        text.replace(forward, forward.replace("        x = x +", "        touch_memory()\n        x = x +")) + BROKEN
    )
    model = "model={import: 'gpt:make', args: {layers: 2, dim: 32, heads: 2, dropout: 0.0}}"
    run = Submitted(cluster, project, model, "code=code", "recovery.retries=0")
    bad = run.first_nodes()[-1]
    run.wait_for_step(5)
    (project / "fails").write_text(bad)
    run.wait_for_end("done")
    run.assert_whole()
    first, last = run.attempts()
    assert (first["class"], first["faults"]) == ("infrastructure", {bad: "gpu_memory_error"}), run.explain()
    assert "CUDA error: uncorrectable ECC error encountered (line " in str(first["reason"])
    assert [(line.node, line.reason) for line in read_bad_nodes(run.folder)] == [
        (bad, "it had this: uncorrectable memory error of a GPU")
    ]
    assert bad not in last["nodes"]
    assert cluster.job(str(last["job_id"]))["ExcNodeList"] == bad
    # The topology that was given has all four nodes, and is older than the fault.
    events = read_events(run.folder / "events.jsonl")
    assert [event.attempt for event in events if event.kind == "probed"] == [1]
