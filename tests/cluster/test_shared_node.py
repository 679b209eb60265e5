"""Two runs with a part of the same node each: neither touches the other, whatever happens to one of them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from submitted import ENDLESS, REPLICA_ON_EACH_NODE, Job, Project

from hpctrain.base.process import WORKER_NAME
from hpctrain.records.topology.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]


def half(project: Project, nodes: str, *settings: str) -> Job:
    """A run with one of the two CPUs, and half of the memory, of each of these nodes. It measures them itself."""
    ours = ("cluster.exclusive=false", "cluster.sbatch=['--cpus-per-task=1']", *settings)
    words = [word for value in ours for word in ("--set", value)]
    return project.job(json.loads(project.hpctrain("submit", "run.yaml", "--json", "-w", nodes, *words).stdout))


def worker_on(node: str, folder: Path) -> psutil.Process:
    """The worker of that run on a node with one device."""
    for process in psutil.process_iter(["cmdline", "name"]):
        if not {"hpctrain.node", "run", str(folder)} <= set(process.info["cmdline"] or []):
            continue
        if process.environ().get("SLURMD_NODENAME") == node:
            for child in process.children():
                if child.name().startswith(WORKER_NAME.format("")):
                    return child
    raise AssertionError(f"no worker of {folder.name} on {node}")


def started(job: Job) -> int:
    """How many generations of the run have started."""
    return [event.kind for event in job.events()].count("generation_started")


def test_two_runs_on_one_node_do_not_touch_each_other(cluster, prepared: Path) -> None:
    project = Project(cluster, prepared)
    wide_only = ("cluster.nodes=2", REPLICA_ON_EACH_NODE.format(2), "checkpoint.every=5", f"steps={ENDLESS}")
    wide = half(project, "node[0-1]", *wide_only)
    small = half(project, "node0", "cluster.nodes=1", f"steps={ENDLESS}")
    for job in (wide, small):
        job.wait_for_step(10)
        assert cluster.job(job.job_id)["JobState"] == "RUNNING"
        topology = Topology.read(job.folder / "topology.json")
        assert topology.provenance.shared
        node = topology.node("node0")
        assert (node.host_facts.cpus, node.host_facts.memory_bytes) == (1, 2 * 2**30)
        assert node.devices[0].memory_bytes <= 2 * 2**30
        assert topology.verdict.status != "refuse"
    # A worker of one is killed: it recovers, and the other goes on.
    worker_on("node0", wide.folder).kill()
    wide.wait_for_event("recovered")
    # A node of one is lost, and it goes on with the node that both have.
    with cluster.slow_to_give_up():
        cluster.kill("node1")
        assert wide.wait_for_event("node_lost").data["node"] == "node1"
        cluster.wait(lambda: wide.members() == ["node0"], 60, wide.explain)
        wide.wait_for_step(wide.steps() + 5)
        # One is requeued while the other trains.
        cluster.run("scontrol", "requeue", wide.job_id)
        small.wait_for_step(small.steps() + 5)
        assert started(small) == 1
        assert started(wide) >= 3
        small.cancel()
        wide.cancel()
    small.assert_whole(small.steps())
    # Its steps were all done by its first generation, and its end left nothing of the other's.
    assert {row.generation for row in small.rows()} == {0}
    wide.assert_whole(max(row.step for row in wide.rows()))
