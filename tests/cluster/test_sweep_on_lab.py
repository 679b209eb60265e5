"""A sweep as one array of a real Slurm: two runs at once; one requeues itself, one is requeued, one is cancelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from submitted import ENDLESS, RUN, Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("slurm", "lab"),
    pytest.mark.timeout(600),
]

STEPS = 60
SMALL = {
    "name": "sweep", "cluster": {**RUN["cluster"], "nodes": 1}, "checkpoint": {"every": 50, "keep": 2},
    "model": {"dims": {"layers": 2, "dim": 32, "heads": 2}}, "batch": {"global": 4},
}  # fmt: skip


def test_each_run_of_a_sweep_recovers_alone(cluster, prepared: Path) -> None:
    project = Project(cluster, prepared)
    (prepared / "sweep.yaml").write_text(yaml.safe_dump({**RUN, **SMALL}))
    words = ("--sweep", f"steps={ENDLESS},{STEPS}", "--sweep", "seed=0-1", "--array-limit", "2", "--json")
    told = json.loads(project.hpctrain("submit", "sweep.yaml", *words).stdout)
    first, second, third, fourth = (project.job(run) for run in told["runs"])
    assert [job.job_id for job in (first, second, third, fourth)] == [f"{told['job_id']}_{task}" for task in range(4)]
    first.wait_for_step(51)
    second.wait_for_step(51)
    assert third.attempts() == fourth.attempts() == []
    assert cluster.job(third.job_id)["Reason"] == "JobArrayTaskLimit"
    # One run comes to its time limit and requeues itself, one is requeued by hand: the others take their places.
    cluster.run("scancel", "--signal=USR2", f"{first.job_id}.0")
    cluster.run("scontrol", "requeue", second.job_id)
    for job in (third, fourth):
        job.wait_until_done()
        job.assert_whole(STEPS)
        assert len(job.attempts()) == 1
    # Each goes on as the task that it was, from its own checkpoint.
    for job in (first, second):
        start = job.wait_for_event("generation_started", attempt=1)
        assert start.data["restore"] is not None
        assert [line["job_id"] for line in job.attempts()] == [job.job_id] * 2
    first.cancel()
    assert cluster.job(second.job_id)["JobState"] == "RUNNING"
    project.hpctrain("cancel", "sweep")
    runs = json.loads(project.hpctrain("status", "sweep", "--json").stdout)["runs"]
    assert [run["state"] for run in runs] == ["cancelled", "cancelled", "done", "done"]
    assert sorted(path.name for path in (fourth.folder / "logs").glob("*.log")) == [
        f"{fourth.job_id}.job.log", f"{fourth.job_id}.{fourth.attempts()[0]['nodes'][0]}.agent.log",
    ]  # fmt: skip
    rows = json.loads(project.hpctrain("compare", "sweep", "--json").stdout)["runs"]
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses)
    assert len(losses) == 4
