"""What nodes, Slurm and people do to a healthy job: nodes are lost and come back, somebody sends TERM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from ClusterShell.NodeSet import NodeSet
from submitted import ENDLESS, Job, Project

from hpctrain.node.exit_markers import closing_node
from hpctrain.records.history.ledger import failures_since_checkpoint
from hpctrain.runs.locate import job_id

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


def test_a_job_outlives_its_nodes_and_what_slurm_says_of_them(project: Project) -> None:
    """Nodes come back before Slurm gives them up, and after it; the first one, with the job script, is among them. The
    job without its script is then stopped by hand, and another one goes on."""
    cluster = project.cluster
    with cluster.slow_to_give_up():
        job = project.submit(f"steps={ENDLESS}", "cluster.nodes=4", "recovery.retries=9")
        job.wait_for_step(5)
        batch = cluster.job(job.job_id)["BatchHost"]
        lost = next(node for node in reversed(job.first_nodes()) if node != batch)

        with gets_its_agent_again(job, lost):
            cluster.kill(lost)
            cluster.heal(lost)
        trains_on(job)

        with gets_its_agent_again(job, batch):
            cluster.kill(batch)
            # Slurm would end a job whose first node comes back without the job's script.
            cluster.wait((job.folder / "left" / "0.kept").exists, 60, "another node keeps the job")
            cluster.heal(batch)
        trains_on(job)

    with cluster.short_messages():
        cluster.kill(lost)
        cluster.wait(lambda: batch in job.members() and lost not in job.members(), 60, job.explain)
        trains_on(job)
        cluster.kill(batch)
        both = {batch, lost}
        cluster.wait(lambda: not both & set(NodeSet(cluster.job(job.job_id)["NodeList"])), 90, "Slurm gave them up")
        trains_on(job)
        cluster.heal(batch, lost)
        trains_on(job)
        assert [line["job_id"] for line in job.attempts()] == [job.job_id]

    cluster.run("scancel", "--signal=TERM", job.job_id)
    first = ended(job, 1)[0]
    assert first["class"] in ("resumable", "no_progress"), first
    assert str(first["reason"]).startswith("stopped by SIGTERM, sent by neither a preemption nor the time limit")
    assert "time_limit" not in {event.kind for event in job.events()}
    assert failures_since_checkpoint(job.attempts()) == 0
    cluster.wait(lambda: cluster.job(job.job_id)["JobState"] == "CANCELLED", 60, "the job without a script has ended")
    (following,) = job.successors()
    assert job_id(job.folder) == following
    assert first["reason"] in str(job.status()["last_end"])
    job.project.hpctrain("cancel", job.name, "--now")


@contextlib.contextmanager
def gets_its_agent_again(job: Job, node: str) -> Iterator[None]:
    """The node, after the block, as a spare for the next generation."""
    address = next((job.folder / "agents").glob(f"{node}*"))
    before = address.read_bytes()
    yield
    job.project.cluster.wait(lambda: address.read_bytes() != before, 60, job.explain)


SLURM_WAITS_S = 20.0
"""For so long after the last step was created, Slurm lets a job be whose first node comes back without its script."""


def test_a_first_node_that_is_back_within_seconds_does_not_end_the_job(project: Project) -> None:
    cluster = project.cluster
    job = project.submit(f"steps={ENDLESS}")
    job.wait_for_step(5)
    batch = cluster.job(job.job_id)["BatchHost"]
    with cluster.slow_to_give_up():
        for seconds in (2.0, 6.0):
            time.sleep(SLURM_WAITS_S + 5)
            with gets_its_agent_again(job, batch):
                cluster.kill(batch)
                time.sleep(seconds)
                cluster.heal(batch)
            trains_on(job)
    other = next(node for node in reversed(job.first_nodes()) if node != batch)
    cluster.kill(other)
    cluster.wait(lambda: batch in job.members() and other not in job.members(), 60, job.explain)
    trains_on(job)
    # Its workers save and leave like the others'.
    cluster.run("scancel", "--signal=TERM", job.job_id)
    first = ended(job, 1)[0]
    assert str(first["reason"]).startswith("stopped by SIGTERM"), first
    cluster.wait(lambda: cluster.job(job.job_id)["JobState"] == "CANCELLED", 60, "the job without a script has ended")
    job.project.hpctrain("cancel", job.name, "--now")


def trains_on(job: Job) -> None:
    """In the job that it began in, which Slurm never put back."""
    job.wait_for_step(job.steps() + 3)
    fields = job.project.cluster.job(job.job_id)
    assert (fields["JobState"], fields["Restarts"]) == ("RUNNING", "0"), fields


def test_a_finished_run_without_its_batch_node_frees_the_others_before_slurm_gives_it_up(project: Project) -> None:
    """Although the node that was to do it is lost too."""
    cluster = project.cluster
    with cluster.slow_to_give_up():
        job = project.submit("cluster.sbatch=[--hold]")
        waiting = project.submit("name=later", f"cluster.after={job.name}", "steps=10", "cluster.nodes=2")
        cluster.run("scontrol", "release", job.job_id)
        job.wait_for_step(10)
        batch = cluster.job(job.job_id)["BatchHost"]
        cluster.kill(batch)
        cluster.wait(lambda: closing_node(job.folder, 0), 240, job.explain)
        closer = closing_node(job.folder, 0)
        assert closer is not None
        cluster.kill(closer)
        over = ("CANCELLED", "COMPLETING")
        cluster.wait(lambda: cluster.job(job.job_id)["JobState"] in over, 90, lambda: str(cluster.job(job.job_id)))
        assert closing_node(job.folder, 0) not in (batch, closer)
        job.wait_until_done(script_too=False)
        (line,) = job.attempts()
        assert (line["class"], line["code"]) == ("done", 0)
        assert "DOWN" not in cluster.run("scontrol", "show", "node", batch).stdout, "Slurm gave the node up first"
        # The nodes that are left are free, and the run that waits for a good end of this one starts on them.
        waiting.wait_until_done()
        assert not {batch, closer} & set(waiting.members())


@pytest.mark.slurms("own")  # another 60 s for each
def test_the_last_of_three_nodes_without_the_script_ends_the_job_when_slurm_has_given_up_the_others(
    project: Project,
) -> None:
    cluster = project.cluster
    job = project.submit(f"steps={ENDLESS}", "cluster.nodes=3")
    job.wait_for_step(5)
    batch = cluster.job(job.job_id)["BatchHost"]
    lost = next(node for node in job.first_nodes() if node != batch)
    cluster.kill(batch, lost)
    first = ended(job, 1)[0]
    assert (first["class"], first["code"]) == ("infrastructure", 75), first
    cluster.wait(lambda: cluster.job(job.job_id)["JobState"] == "CANCELLED", 60, "the job without a script has ended")
    (following,) = job.successors()
    assert job_id(job.folder) == following
    cluster.heal(batch, lost)
    job.project.hpctrain("cancel", job.name, "--now")
