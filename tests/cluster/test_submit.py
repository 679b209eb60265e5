"""A run as a Slurm job on the lab: submitted, watched, hit by every fault, and finished all the same."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import psutil
import pytest
from followed import Followed
from gated_model import GatedModel
from submitted import ENDLESS, RUN_STEPS, Job, Project

from hpctrain import __version__
from hpctrain.records.history.provenance import RunProvenance, read_environments
from hpctrain.records.history.run_log import read_events
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]


def listening(folder: Path) -> set[str]:
    """Addresses that agents and workers listen at, each seen from within its own node's network."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) not in words or not {"hpctrain.node", "hpctrain.worker"} & set(words):
            continue
        links = []
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(str(path.readlink()))
        for table in ("tcp", "tcp6"):
            rows = [row.split() for row in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]]
            found |= {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}
    # As the kernel writes IPv4 addresses: the bytes the wrong way round, in hex.
    return {socket.inet_ntoa(bytes.fromhex(place.partition(":")[0])[::-1]) for place in found}


def test_a_probe_is_a_job_that_sees_the_slow_node(cluster, prepared: Path) -> None:
    project = Project(cluster, prepared)
    cluster.shape("100mbit")
    cluster.lab("shape", "node2", "--rate", "25mbit")
    done = project.hpctrain("probe", "-N", "4", "-p", "low", "-o", "slow.json", check=False)
    assert done.returncode in (0, 3), done.stderr
    topology = Topology.read(prepared / "slow.json")
    assert [node.id for node in topology.nodes] == list(cluster.nodes)
    assert not topology.provenance.loopback
    assert topology.provenance.notes == []
    assert all(node.iface == "eth0" and node.host_facts.mtu["eth0"] >= 1280 for node in topology.nodes)
    # Virtual nodes have one clock.
    assert all(abs(node.host_facts.clock_offset_s) < 0.01 for node in topology.nodes[1:])
    assert topology.fabric.classes[0].backend["gloo"].alpha_s > topology.fabric.classes[0].alpha_s
    rates = {
        (link.a, link.b): min(link.ab.isolated_bytes_per_s or 0, link.ba.isolated_bytes_per_s or 0)
        for link in topology.fabric.links
    }
    slow = [rate for pair, rate in rates.items() if "node2" in pair]
    quick = [rate for pair, rate in rates.items() if "node2" not in pair]
    assert len(slow) == len(quick) == 3
    assert max(slow) < 0.35 * min(quick)


def test_a_node_is_lost_and_the_rest_goes_on_with_the_job(project: Project) -> None:
    job = project.submit(f"steps={ENDLESS}")
    assert project.hpctrain("status", job.job_id, "--json").stdout
    job.wait_for_step(15)
    lost = job.working_nodes()[-1]
    assert job.status()["state"] == "running"
    own = {json.loads(path.read_text())["addr"] for path in (job.folder / "agents").glob("node*.json")}
    assert len(own) == 3
    assert listening(job.folder) == own
    # Slurm would end the job on a node that it has given up, and the commands below take their time.
    with project.cluster.slow_to_give_up():
        project.cluster.kill(lost)
        assert job.wait_for_event("node_lost").data["node"] == lost
        first = next(node for node in job.members() if node != lost)
        assert project.hpctrain("exec", job.name, first, "--", "hostname").stdout == f"{first}\n"
        assert project.hpctrain("exec", job.name, "--", "sh", "-c", "exit 7", check=False).returncode == 7
        job.wait_for_event("recovered")
        job.wait_for_step(job.steps() + 15)
        assert lost not in job.members()
        job.cancel()
    job.assert_whole(job.steps())


def test_the_batch_host_is_lost_too(project: Project) -> None:
    """The job script dies with its node; the agents that are left finish the run, or on a slow machine the next job."""
    job = project.submit()
    job.wait_for_step(15)
    batch = project.cluster.job(job.job_id)["BatchHost"]
    project.cluster.kill(batch)
    job.wait_until_done(script_too=False)
    job.assert_whole()
    assert batch not in job.members()


def test_a_preempted_job_saves_comes_back_and_is_done(project: Project) -> None:
    model = GatedModel(project.path)
    # On a busy machine the job script may need longer to end than the lab's grace time of 10 s.
    with project.cluster.slow_to_give_up():
        job = project.submit("cluster.nodes=2", *model.settings)
        with contextlib.closing(Followed(project.cluster, job.folder, job.folder / "followed")) as followed:
            job.wait_for_step(15)
            preempt(job)
            model.gate.touch()
            job.wait_until_done()
            assert_survived_preemption(job)
            assert job.steps() == RUN_STEPS
            followed.assert_seen_to_its_end()
    _assert_software_is_recorded(job)


def _assert_software_is_recorded(job: Job) -> None:
    """Each node of each attempt has a line, and equal software is no change."""
    attempts = RunFolder(job.folder).attempts()
    expected = {(line["attempt"], node) for line in attempts for node in line["nodes"]}
    lines = read_environments(job.folder)
    assert {(line.attempt, line.node) for line in lines} == expected
    assert {line.software.hpctrain for line in lines} == {line["hpctrain"] for line in attempts} == {__version__}
    assert "environment_changed" not in {event.kind for event in read_events(job.folder / "events.jsonl")}
    assert RunProvenance.read(job.folder / "provenance.json", owned=True).slurm is not None


TERM_ONLY = """
nodes: [{name: node0}, {name: node1}, {name: node2}, {name: node3}, {name: node4}]
slurm: {preempt_send_user_signal: false}
"""


def test_five_nodes_of_a_cluster_that_preempts_with_term_alone(project: Project, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(TERM_ONLY)
    project.cluster.lab("up", str(tmp_path / "lab.yaml"), "--replace")
    try:
        with project.cluster.slow_to_give_up():
            # The topology file is of four nodes: the job measures its five itself.
            job = project.submit("cluster.nodes=4-5", f"steps={ENDLESS}")
            job.wait_for_step(15)
            preempt(job)
            job.wait_for_step(job.steps() + 15)
            job.cancel()
            assert_survived_preemption(job)
    finally:
        project.cluster.lab("up", "--nodes", "4", "--replace")


def preempt(job: Job) -> None:
    """Another job takes the nodes for a while, until the run is back."""
    job.project.cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 5", "-o", "/dev/null")
    job.wait_for_event("generation_started", attempt=1)


def assert_survived_preemption(job: Job) -> None:
    first, second = job.attempts()
    # Slurm may have requeued the job itself, before its script ended.
    assert str(first["reason"]).endswith(("back to the queue", "back into the queue"))
    assert "preempted" in {event.kind for event in job.events() if event.attempt == 0}
    rows = job.rows()
    saved = max(row.step for row in rows if row.generation < rows[-1].generation)
    assert second["checkpoint_before"] == f"step-{saved:08d}"
    # The notice allowed a save: nothing was done twice.
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))


def test_two_runs_share_the_cluster(project: Project) -> None:
    """One meets its time limit; beside it, the other is requeued by hand, cancelled and resubmitted."""
    short = project.submit(
        "cluster.nodes=1", "cluster.time='3'", "cluster.save_notice_s=90", f"steps={ENDLESS}", "checkpoint.every=1000"
    )
    assert_survives_its_user(project.submit("cluster.nodes=2", f"steps={ENDLESS}"))
    # Three minutes, of which the second half is kept for saving: a busy machine may need long until the first step.
    project.cluster.wait(lambda: len(short.attempts()) >= 2, 120, "the attempt after the time limit")
    assert short.attempts()[0]["reason"] == "stopped before the time limit, saved, and back to the queue"
    assert short.attempts()[1]["job_id"] != short.job_id
    assert "time_limit" in {event.kind for event in short.events()}
    short.wait_for_step(short.steps() + 20)
    short.cancel()
    # Every step was done once: the notice was enough to save.
    steps = [row.step for row in short.rows()]
    assert steps == list(range(1, len(steps) + 1))


def assert_survives_its_user(job: Job) -> None:
    project = job.project
    job.wait_for_step(15)
    project.cluster.run("scontrol", "requeue", job.job_id)
    project.cluster.wait(lambda: len(job.attempts()) == 2, 60, "the second attempt")
    assert [attempt["restarts"] for attempt in job.attempts()] == [0, 1]
    job.wait_for_step(job.steps() + 10)
    job.cancel()
    assert job.status()["state"] == "cancelled"
    before = job.steps()
    again = json.loads(project.hpctrain("resubmit", job.name, "--json").stdout)
    assert again["job_id"] != job.job_id
    job.wait_for_step(before + 10)
    job.cancel()
    job.assert_whole(job.steps())
    # The cancelled job had saved: what was done before is not done again.
    rows = job.rows()
    assert min(row.step for row in rows if row.generation == rows[-1].generation) == before + 1
