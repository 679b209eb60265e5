"""What Slurm and people do to a healthy step: a lost node comes back and srun ends it, somebody sends TERM."""

from __future__ import annotations

import re

import pytest
from submitted import ENDLESS, Job, Project

from hpctrain.records.history.ledger import failures_since_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("slurm", "lab"),
    pytest.mark.slurms("own", "next"),
    pytest.mark.timeout(900),
]


def ended(job: Job, attempts: int) -> list[dict[str, object]]:
    """The lines of the ledger, once so many attempts are closed."""
    job.project.cluster.wait(
        lambda: sum("end" in line for line in job.attempts()) >= attempts, 120, lambda: str(job.attempts())
    )
    return job.attempts()


def test_a_node_that_comes_back_is_no_failure_of_the_run_and_term_by_hand_is_no_time_limit(project: Project) -> None:
    cluster = project.cluster
    job = project.submit(f"steps={ENDLESS}", "cluster.nodes=2-3", "recovery.retries=1")
    job.wait_for_step(15)
    lost = job.members()[-1]
    assert cluster.job(job.job_id)["BatchHost"] != lost
    cluster.kill(lost)
    cluster.wait(lambda: lost not in job.members(), 60, job.explain)
    # Before Slurm gives the node up: its slurmd comes back, and srun ends the step on all nodes.
    cluster.heal(lost)
    first = ended(job, 1)[0]
    if first["class"] == "resumable":
        pytest.fail(f"Slurm gave the node up first: {first}")
    assert first["class"] == "infrastructure", first
    # srun has two words for it: the new slurmd knows no such step, or has not answered in time.
    why = "(came back without its part of the step, and|cannot be reached any more:) Slurm ended the step on all nodes"
    said = r"srun: (Aborting, io error and missing step on node|Cannot communicate with node) \d"
    assert re.match(rf"{lost} {why} \({said}", str(first["reason"])), first
    assert failures_since_checkpoint(job.attempts()) == 0
    # It goes on, and the person sees why in each place. The job prints the line after it has written the ledger's.
    cluster.wait(lambda: len(job.attempts()) == 2, 120, job.explain)
    log = (job.folder / "logs" / f"{job.job_id}.job.log").read_text()
    assert f"attempt 0 ended (infrastructure): {first['reason']}" in log
    job.wait_for_event("generation_started", attempt=1)
    assert first["reason"] in str(job.status()["last_end"])
    before = job.steps()
    job.wait_for_step(before + 15)
    cluster.run("scancel", "--signal=TERM", str(job.attempts()[1]["job_id"]))
    second = ended(job, 2)[1]
    assert second["class"] in ("resumable", "no_progress"), second
    assert str(second["reason"]).startswith("stopped by SIGTERM, sent by neither a preemption nor the time limit")
    assert "time_limit" not in {event.kind for event in job.events()}
    job.cancel()


def test_a_finished_run_without_its_batch_node_frees_the_others_before_slurm_gives_it_up(project: Project) -> None:
    cluster = project.cluster
    with cluster.slow_to_give_up():
        job = project.submit("cluster.sbatch=[--hold]")
        waiting = project.submit("name=later", f"cluster.after={job.name}", "steps=10", "cluster.nodes=2")
        cluster.run("scontrol", "release", job.job_id)
        job.wait_for_step(10)
        batch = cluster.job(job.job_id)["BatchHost"]
        cluster.kill(batch)
        job.wait_until_done(script_too=False)
        over = ("CANCELLED", "COMPLETING")
        cluster.wait(lambda: cluster.job(job.job_id)["JobState"] in over, 30, lambda: str(cluster.job(job.job_id)))
        (line,) = job.attempts()
        assert (line["class"], line["code"]) == ("done", 0)
        assert "DOWN" not in cluster.run("scontrol", "show", "node", batch).stdout, "Slurm gave the node up first"
        # The nodes that are left are free, and the run that waits for a good end of this one starts on them.
        waiting.wait_until_done()
        assert batch not in waiting.members()
