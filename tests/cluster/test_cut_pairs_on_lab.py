"""Two nodes whose link is cut, all else being whole: the run goes on without one of them, within its job."""

from __future__ import annotations

import json

import pytest
from submitted import ENDLESS, Job, Project

from hpctrain.records.history.ledger import read_bad_nodes
from hpctrain.records.history.run_log import Event
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(1500)]

STEPS = 40


def left_out(job: Job) -> list[Event]:
    return [event for event in job.events() if event.kind == "node_left_out"]


def assert_one_of_them_is_left_out(job: Job, pair: tuple[str, str], nodes: set[str]) -> None:
    assert read_bad_nodes(job.folder) == []
    (event,) = left_out(job)
    assert event.data["node"] in pair, event
    assert set(job.members()) == nodes - {event.data["node"]}


def assert_done_in_one_job(job: Job) -> None:
    job.wait_until_done()
    job.assert_whole(STEPS)
    assert [(line["class"], line["job_id"]) for line in job.attempts()] == [("done", job.job_id)], job.explain()
    assert_one_of_them_is_left_out(job, ("node1", "node2"), {"node0", "node1", "node2"})


def test_a_pair_that_is_cut_during_a_run(project: Project) -> None:
    job = project.submit("cluster.nodes=4", f"steps={ENDLESS}")
    job.wait_for_step(5)
    batch = project.cluster.job(job.job_id)["BatchHost"]
    working = next(node for node in job.working_nodes() if node != batch)
    other = next(node for node in job.members() if node not in (batch, working))
    project.cluster.cut(working, other)
    assert "do not hear each other" in job.wait_for_event("node_left_out").reason
    job.wait_for_event("recovered")
    job.wait_for_step(job.steps() + 5)
    assert_one_of_them_is_left_out(job, (working, other), {f"node{at}" for at in range(4)})
    assert [line["job_id"] for line in job.attempts()] == [job.job_id]
    job.cancel()
    job.assert_whole(job.steps())


def test_a_pair_that_was_cut_before_the_probe(project: Project) -> None:
    project.cluster.shape("100mbit")
    project.cluster.cut("node1", "node2")
    told = project.hpctrain("submit", "run.yaml", "--json", "-w", "node[0-2]", "--set", f"steps={STEPS}")
    job = project.job(json.loads(told.stdout))
    assert_done_in_one_job(job)
    assert Topology.read(job.folder / "topology.json").fabric.broken == [("node1", "node2")]
    assert left_out(job)[0].reason == "node2 is left out: the probe could not measure its link to node1"
    assert not {"node1", "node2"} <= set(Plan.read(job.folder / "plan.json").nodes)


def test_a_pair_that_was_cut_between_the_probe_and_the_run(project: Project) -> None:
    project.cluster.cut("node1", "node2")
    job = project.submit(f"steps={STEPS}", "cluster.nodelist='node[0-2]'")
    assert_done_in_one_job(job)
    assert left_out(job)[0].reason == "node2 is left out: it and node1 do not hear each other"
