"""What follows an attempt on a real Slurm: a new job without the bad node, a queued successor, or the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from real_text import prepare_text
from submitted import Project

from hpctrain.records.history.ledger import read_bad_nodes
from hpctrain.runs.locate import job_id

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model"

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab")]

STEPS = 60
"""The first generation pauses before each of them, and its node is lost long before the last one."""
RUN = {
    "adapt": {"mode": "off"},  # measured times of a busy machine change no plan
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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    prepare_text(path)
    (path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture(autouse=True)
def paced(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs' first generations pause before each step."""
    monkeypatch.setitem(cluster.env, "PACED_AT_FIRST", "yes")


@pytest.mark.timeout(1200)
def test_what_follows_an_attempt(project: Project) -> None:
    """Three runs at once: one loses a node it cannot do without, one that of its script, one fails by itself."""
    cluster = project.cluster
    alone = project.submit()
    lost = alone.first_nodes()[-1]
    assert cluster.job(alone.job_id)["BatchHost"] != lost
    alone.wait_for_step(5)
    cluster.kill(lost)

    fatal = project.submit(*ONE_NODE, "steps=50", *DIVERGES)
    chained = project.submit(*ONE_NODE)
    (successor,) = chained.successors()
    assert f"afterany:{chained.job_id}" in cluster.job(successor)["Dependency"]
    (script,) = chained.first_nodes()
    chained.wait_for_step(5)
    cluster.kill(script)

    fatal.wait_for_end("failed")
    fatal.wait_for_script()
    assert [line["class"] for line in fatal.attempts()] == ["fatal", "fatal"], fatal.explain()
    assert [line["job_id"] for line in fatal.attempts()] == [fatal.job_id, fatal.successors()[0]]
    assert "2 failures in a row without a new checkpoint" in str(fatal.attempts()[-1]["reason"])
    assert cluster.job(fatal.successors()[-1])["JobState"] == "CANCELLED"

    for run in (chained, alone):
        run.wait_until_done()
        run.assert_whole(STEPS)
        assert [line["class"] for line in run.attempts()] == ["infrastructure", "done"], run.explain()
    # A new job that knows of the lost node, queued by the one that lost it.
    assert job_id(alone.folder) == alone.successors()[-1] == alone.attempts()[-1]["job_id"]
    assert [line.node for line in read_bad_nodes(alone.folder)] == [lost]
    assert cluster.job(alone.successors()[-1])["ExcNodeList"] == lost
    # Nothing was left to queue one: what waited took over, queued the next, and cancelled it when all was done.
    assert chained.attempts()[-1]["job_id"] == successor
    assert cluster.job(chained.successors()[-1])["JobState"] == "CANCELLED"


BROKEN = """

import itertools
import os
import time
from pathlib import Path

_FAILS = Path(os.environ["SLURM_SUBMIT_DIR"]) / "fails" if "SLURM_SUBMIT_DIR" in os.environ else Path("/nonexistent")


_CALLS = itertools.count()


def touch_memory() -> None:
    if "RANK" not in os.environ:
        return
    while next(_CALLS) > 100 and not _FAILS.exists():
        time.sleep(0.05)
    if _FAILS.exists() and _FAILS.read_text() == os.environ.get("SLURMD_NODENAME"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
"""A model that meets what torch raises on a GPU with bad memory, on the node whose name lies in a file. After a hundred
calls, some ten steps, it waits for that file, so that the run is not done before its node fails."""


@pytest.mark.timeout(600)
def test_a_node_whose_gpu_fails_is_left_out_and_spends_no_retry(project: Project) -> None:
    shutil.copytree(EXAMPLE / "code", project.path / "code")
    code, forward = (
        project.path / "code" / "gpt.py",
        "    def forward(self, x: Tensor) -> Tensor:\n        x = x + self.dropout",
    )
    text = code.read_text()
    assert text.count(forward) == 1
    code.write_text(
        text.replace(forward, forward.replace("        x = x +", "        touch_memory()\n        x = x +")) + BROKEN
    )
    model = "model={import: 'gpt:make', args: {layers: 2, dim: 32, heads: 2, dropout: 0.0}}"
    run = project.submit(model, "code=code", "recovery.retries=0")
    bad = run.first_nodes()[-1]
    run.wait_for_step(5)
    (project.path / "fails").write_text(bad)
    run.wait_until_done()
    run.assert_whole(STEPS)
    first, last = run.attempts()
    assert (first["class"], first["faults"]) == ("infrastructure", {bad: "gpu_memory_error"}), run.explain()
    assert "CUDA error: uncorrectable ECC error encountered (line " in str(first["reason"])
    assert [(line.node, line.reason) for line in read_bad_nodes(run.folder)] == [
        (bad, "it had this: uncorrectable memory error of a GPU")
    ]
    assert bad not in last["nodes"]
    assert project.cluster.job(str(last["job_id"]))["ExcNodeList"] == bad
    # The topology that was given has all four nodes, and is older than the fault.
    assert [event.attempt for event in run.events() if event.kind == "probed"] == [1]
