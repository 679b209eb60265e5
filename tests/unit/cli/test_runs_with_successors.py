"""A run between two of its jobs: it waits, and nobody takes it for one that has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import event, submitted_run

from hpctrain.base.errors import InputError


@pytest.fixture
def waiting(fake, runs) -> Path:
    """The run's job was lost with its node; the next one waits for nodes."""
    job = fake.submit("--nodes=2", "--no-requeue")
    behind = fake.submit("--nodes=3")
    folder = submitted_run(runs, job, event("generation_started", members=["gpu1", "gpu2"]))
    line = {"job_id": behind, "after": job, "time_s": 0}
    (folder / "successors.jsonl").write_text(json.dumps(line) + "\n")
    fake.fail_node("gpu1")
    assert (fake.jobs[1].state, fake.jobs[2].state) == ("NODE_FAIL", "PENDING")
    return folder


def test_its_status_is_that_of_the_job_that_takes_over(fake, waiting, hpctrain):
    told = json.loads(hpctrain("status", "2", "--json").stdout)
    assert (told["state"], told["folder"]) == ("queued", str(waiting))
    assert "job 2" in told["reason"]
    fake.run(["scancel", "2"])
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "failed"


def test_it_is_neither_resubmitted_nor_pruned(fake, waiting, hpctrain):
    assert isinstance(hpctrain("resubmit", "gpt").exception, InputError)
    told = hpctrain("prune", "gpt", "--older-than", "0h", "--yes")
    assert "its job 2 is PENDING" in told.output + told.stderr
    assert (waiting / "run.yaml").exists()


def test_a_cancel_takes_the_job_that_waits(fake, waiting, hpctrain):
    assert (
        hpctrain("cancel", "gpt").output
        == "jobs 2 cancelled; they were waiting; there is no checkpoint yet, nothing was saved\n"
    )
    assert fake.jobs[2].state == "CANCELLED"
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["state"] == "cancelled"
