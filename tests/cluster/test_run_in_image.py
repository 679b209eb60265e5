"""The whole run inside a real image on the lab: submitted, a node lost, preempted, and finished all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from submitted import ENDLESS, REPLICA_ON_EACH_NODE, Project

from hpctrain.records.history.provenance import RunProvenance

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab", "apptainer"), pytest.mark.timeout(900)]


def test_a_run_in_an_image_survives_a_lost_node_and_a_preemption(cluster, prepared: Path, small_image: Path) -> None:
    """The run has more steps than any machine does meanwhile, and is cancelled: nothing here has to be in time."""
    project = Project(cluster, prepared)
    cluster.shape("100mbit")
    run = ["submit", "run.yaml", "--set", f"container={{image: {small_image}, env: {{SEEN_INSIDE: $SLURM_JOB_ID}}}}"]
    more = ("--set", f"steps={ENDLESS}", "--set", REPLICA_ON_EACH_NODE.format(3))
    told = json.loads(project.hpctrain(*run, "--json", *more).stdout)
    job = project.job(told)
    job.wait_for_step(10)
    inside = project.hpctrain("exec", job.name, job.members()[0], "--", "env").stdout
    seen = dict(line.split("=", 1) for line in inside.splitlines() if "=" in line)
    assert seen["HPCTRAIN_IMAGE"] == str(small_image)
    assert seen["SEEN_INSIDE"] == job.job_id
    identity = RunProvenance.read(job.folder / "provenance.json", owned=True).image
    assert identity is not None
    assert identity.id is not None
    assert "hpctrain" in str(identity.labels), "labels of an image that hpctrain built"
    # What the run needs is inside: the first node lists it.
    assert "torch" in (job.folder / "requirements.lock").read_text()

    with cluster.slow_to_give_up():
        lost = job.working_nodes()[-1]
        cluster.kill(lost)
        job.wait_for_event("node_lost")
        job.wait_for_event("recovered")
        others = f"--exclude={lost}"
        cluster.run("sbatch", "-p", "high", "-N3", others, "--exclusive", "--wrap", "sleep 3", "-o", "/dev/null")
        # The notice reached the agents inside, whose image was still there to save with.
        job.wait_for_event("preempted")
        cluster.wait(lambda: "end" in job.attempts()[0], 120, job.explain)
        saved = job.steps()
    assert job.attempts()[0]["reason"] == "preempted, saved, and back to the queue"
    # Slurm ends the job on the lost node when that is back, and the next one begins.
    cluster.heal(lost)
    cluster.wait(lambda: job.steps() >= saved + 10, 240, job.explain)
    job.cancel()
    job.assert_whole(job.steps())


def test_a_check_of_the_image_sends_what_slurm_sends(small_image: Path) -> None:
    words = [sys.executable, "-m", "hpctrain", "image", "check", str(small_image), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode in (0, 3), done.stdout
    assert found["signals"]["value"] == "SIGTERM and SIGUSR2 are delivered"
    assert found["torch"]["level"] == found["submitit"]["level"] == "ok"
