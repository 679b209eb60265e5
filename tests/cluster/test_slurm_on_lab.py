"""hpctrain.slurm against a real Slurm: what it asks is understood, and what it reads is true."""

from __future__ import annotations

import time

import pytest

from hpctrain.base.process import SystemRunner
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import pending_job_text
from hpctrain.slurm.limits import JobRequest, check_request
from hpctrain.slurm.watch import JobWatcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("slurm", "lab"),
    pytest.mark.slurms("own", "next"),
    pytest.mark.timeout(900),
]

ENDS_AT_ONCE = """#!/bin/bash
trap 'exit 0' USR1
echo ready
while true; do sleep 0.1; done
"""


@pytest.fixture
def slurm(cluster):
    # A person's own formats must not reach the clients.
    return Slurm(SystemRunner(), {**cluster.env, "SQUEUE_FORMAT": "%j", "SLURM_TIME_FORMAT": "relative"})


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH --output={tmp_path}/log --time=5\nsleep ${{1:-120}}\n")
    return path


def submit(cluster, *options: str) -> str:
    return cluster.run("sbatch", "--parsable", *options).stdout.strip()


def test_the_cluster_is_read_as_it_is(cluster, slurm):
    assert slurm.available()
    assert [node.name for node in slurm.nodes()] == list(cluster.nodes)
    assert all(node.accepts_jobs for node in slurm.nodes())
    partitions = {partition.name: partition for partition in slurm.partitions()}
    assert partitions["low"].nodes == cluster.nodes
    assert slurm.config()["cred_expire_s"] == 10
    too_many = JobRequest("low", 5, 5, None, None, None, None)
    assert "allowed: 1 to 4" in check_request(too_many, list(partitions.values()), slurm.nodes())[0]


def test_a_job_from_its_submission_to_its_end(cluster, slurm, script):
    watcher = JobWatcher(slurm, [submit(cluster, "--nodes=4", "--exclusive", str(script))])
    assert watcher.poll(time.monotonic())
    (job_id,) = watcher.known
    cluster.wait(lambda: slurm.job(job_id).state == "RUNNING", 30, "the job runs")
    job = slurm.job(job_id)
    assert (job.nodes, job.batch_host, job.time_limit_s) == (cluster.nodes, "node0", 300)
    assert abs(job.start_s - time.time()) < 60
    waiting = submit(cluster, "--nodes=1", str(script))
    cluster.wait(lambda: "(" in pending_job_text(slurm.job(waiting)), 30, "the reason for waiting is known")
    assert set(slurm.jobs([job_id, waiting, "99999"])) == {job_id, waiting}
    slurm.requeue(job_id)
    cluster.wait(lambda: slurm.job(job_id).is_waiting, 30, "the job waits again")
    assert slurm.job(job_id).restarts == 1
    slurm.cancel(job_id)
    slurm.cancel(waiting)
    cluster.wait(lambda: slurm.job(job_id).state == "CANCELLED", 30, "the job is cancelled")
    assert slurm.signal(job_id, "TERM") is False
    assert watcher.poll(time.monotonic() + 60)
    assert watcher.known[job_id].state == "CANCELLED"
    assert watcher.all_ended
    assert slurm.job("99999") is None


def test_who_brings_back_a_job_that_ends_within_its_grace_time(cluster, slurm, tmp_path):
    """The older Slurm calls it done; the newer one requeues it, unless the job has said that it must not."""
    path = tmp_path / "ends.sh"
    path.write_text(ENDS_AT_ONCE)
    options = ("--partition=low", "--exclusive", "--requeue", "--signal=B:USR1@30", f"--output={tmp_path}/%j.out")
    stays, goes = (submit(cluster, *options, f"--nodelist={node}", str(path)) for node in ("node0", "node1"))
    outputs = [tmp_path / f"{job_id}.out" for job_id in (stays, goes)]
    cluster.wait(lambda: all(out.exists() and out.read_text() for out in outputs), 30, "both jobs listen")
    slurm.update(stays, Requeue=0)
    with cluster.slow_to_give_up():
        cluster.run("srun", "--partition=high", "--nodelist=node[0-1]", "--nodes=2", "--exclusive", "true")
    cluster.wait(lambda: slurm.job(goes).state != "COMPLETING", 30, "it is known what becomes of the jobs")
    newer = slurm.config()["version"] >= "24"
    assert (slurm.job(goes).state, slurm.job(goes).restarts) == (("PENDING", 1) if newer else ("COMPLETED", 0))
    assert slurm.job(stays).state is ("PREEMPTED" if newer else "COMPLETED")


def test_a_script_before_it_is_submitted(cluster, slurm, script):
    estimate = slurm.test_only(script, ["--nodes=2"])
    assert (len(estimate.nodes), estimate.problem) == (2, None)
    assert abs(estimate.start_s - time.time()) < 3600
    assert "not available" in slurm.test_only(script, ["--nodes=9"]).problem
