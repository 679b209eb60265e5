"""A run on two nodes of the lab, each of which is cut into two devices: measured, planned, trained and recovered."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from submitted import ENDLESS, Job, Project

from hpctrain.base.process import WORKER_NAME
from hpctrain.base.system.core_sets import core_sets
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(900)]


def workers(folder: Path) -> dict[tuple[str, int], psutil.Process]:
    """The run's workers, by node and number on the node."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if not {"hpctrain.node", "run", str(folder)} <= set(process.info["cmdline"] or []):
            continue
        for child in process.children():
            if child.name().startswith(WORKER_NAME.format("")):
                name = child.name()
                rank = int(name.removeprefix(WORKER_NAME.format("")))
                found[process.environ()["SLURMD_NODENAME"], rank] = child
    return found


def cut(project: Project, *settings: str) -> Job:
    """A run on two nodes of two devices. It measures them itself."""
    ours = ("cluster.nodes=2", "cluster.devices_per_node=2", *settings)
    words = [word for value in ours for word in ("--set", value)]
    return project.job(json.loads(project.hpctrain("submit", "run.yaml", "--json", *words).stdout))


@pytest.mark.parametrize(
    "parallel",
    [
        "{mode: fixed, pp: 1, dp: 2, tp: 2}",
        "{mode: fixed, pp: 2, dp: 2, tp: 1}",
        "{mode: fixed, pp: 1, dp: 4, tp: 1, zero: 3, shard: node}",
    ],
)
def test_two_nodes_of_two_devices_train_and_recover_from_a_killed_worker(
    parallel: str, cluster, prepared: Path
) -> None:
    # Only plans with several replicas on each node have sums by level.
    compression = "compression={mode: int4, intra_node: bf16}"
    job = cut(Project(cluster, prepared), f"parallel={parallel}", f"steps={ENDLESS}", compression)
    job.wait_for_step(5)

    topology = Topology.read(job.folder / "topology.json")
    assert sorted(topology.device_ids()) == [f"{node}:cpu{n}" for node in job.members() for n in (0, 1)]
    for node in topology.nodes:  # other processes may delay the messages so much that they give no line
        why = f"{node.id}: messages between its devices were not measured: their times do not grow"
        assert node.intra_bytes_per_s or any(note.startswith(why) for note in topology.provenance.notes)
    plan = Plan.read(job.folder / "plan.json")
    assert len(set(plan.ranks)) == plan.world_size == 4
    if plan.tp == 2:
        groups = [set(part) for replica in plan.replicas for part in replica.devices]
        assert all(len({device.node for device in group}) == 1 for group in groups)
    sent = job.rows()[-1].bytes_sent
    assert [spec.codec.mode for spec in plan.compression] == (["bf16", "int4"] if plan.zero else ["int4"])
    assert (sent.dp_inter_node is None) == (plan.zero == 0)
    if plan.zero:
        assert sent.dp_inter_node < sent.dp_intra_node < sent.dp
        assert plan.shards == 2
        assert plan.ranks[0].node == plan.ranks[1].node != plan.ranks[2].node == plan.ranks[3].node

    found = workers(job.folder)
    assert sorted(rank for _, rank in found) == [0, 1, 2, 3]
    for (node, rank), process in found.items():
        device = plan.ranks[rank]
        assert device.node == node
        # Each node of the lab has all cores of this machine.
        assert process.cpu_affinity() == list(core_sets(2, environ={})[int(device.device.removeprefix("cpu"))])

    before = job.steps()
    found[plan.ranks[3].node, 3].kill()
    assert job.wait_for_event("worker_died").data["rank"] == 3
    job.wait_for_event("recovered")
    assert job.steps() >= before
    job.wait_for_step(before + 5)
    job.cancel()
