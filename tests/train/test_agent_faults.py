"""Faults of the processes that are not workers: fork servers that load or are killed, agents that crash."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from train_site import Outcome, Site, kill_node, kill_worker, node_process, wait_for, wait_for_step, worker_of

from hpctrain.agent.generation_store import GenerationStore
from hpctrain.base.process import WORKER_NAME
from hpctrain.jobs.bad_nodes import nodes_to_blame
from hpctrain.records.history.run_log import last_row_of_each_step, read_events
from hpctrain.records.plan.plan import Plan

pytestmark = pytest.mark.slow

LOADS = """
import os, sys, time
words = " ".join(sys.orig_argv)
if "hpctrain.worker fork" in words:
    from hpctrain.base import loading
    load = loading.load
    def held(module):
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
        return load(module)
    loading.load = held
"""
CRASHES = """
import os, sys
if "hpctrain.node" in " ".join(sys.orig_argv):
    from hpctrain.agent import group
    news = group.WorkerGroup.news
    def crash(self, now):
        if os.path.exists(os.environ["CRASH"] + self._node):
            raise RuntimeError("the dog ate it")
        return news(self, now)
    group.WorkerGroup.news = crash
"""
NO_VALIDATION = ("--set", "validation.batches=0")


def finish(process, folder: Path) -> Outcome:  # type: ignore[no-untyped-def]
    said, _ = process.communicate(timeout=800)
    return Outcome(process.returncode, folder, said)


def kinds(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    return [event.kind for event in read_events(path)] if path.exists() else []


def working(folder: Path) -> str:
    """A node that has workers and is not the first: the planner may leave nodes idle.

    The plan is the one that the record names: it is there before the event `generation_started`. The copy plan.json is
    written while the workers start."""
    record = GenerationStore(folder / "generations").newest()
    assert record is not None
    return next(node for node in Plan.read(folder / record.plan).nodes if node != "local0")


def others(node: str) -> list[str]:
    return [name for name in ("local0", "local1", "local2") if name != node]


def fork_server(folder: Path, node: str) -> psutil.Process:
    children = node_process(folder, node).children()
    return next(child for child in children if not child.name().startswith(WORKER_NAME.format("")))


def test_a_fault_while_torch_still_loads_costs_a_generation_and_no_agent(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOADS)
    env = {"PYTHONPATH": str(tmp_path), "GATE": str(tmp_path / "gate")}
    known = set((site.path / "runs").glob("*"))
    words = ("train", "run.yaml", "--local", "3", "--topology", "four.json", "--set", "steps=5", *NO_VALIDATION)
    process = site.start(*words, env=env)
    folder = site.run_folder(known)
    wait_for(lambda: "generation_started" in kinds(folder), 60, "the first generation")
    lost = working(folder)
    kill_node(folder, lost)
    wait_for(lambda: kinds(folder).count("generation_started") == 2, 60, "the second generation")
    (tmp_path / "gate").touch()
    outcome = finish(process, folder)
    assert outcome.code == 0, outcome.said
    assert {"agent_crashed", "fork_server_lost", "failed"}.isdisjoint(kinds(folder)), outcome.said
    assert nodes_to_blame(outcome.events) == {lost: "it was lost"}
    assert [row.step for row in last_row_of_each_step(outcome.rows)] == [1, 2, 3, 4, 5]


def test_a_killed_fork_server_is_replaced_and_the_next_generation_starts_from_it(site: Site) -> None:
    known = set((site.path / "runs").glob("*"))
    process = site.start(
        "train", "run.yaml", "--local", "2", "--topology", "four.json", "--set", "steps=1000000", *NO_VALIDATION
    )
    folder = site.run_folder(known)
    wait_for_step(folder, 2)
    killed = fork_server(folder, "local1")
    killed.kill()
    wait_for(lambda: "fork_server_lost" in kinds(folder), 60, "the event of the loss")
    # Its workers go on meanwhile.
    assert kinds(folder).count("generation_started") == 1
    kill_worker(folder, "local0")
    wait_for_step(folder, 1, generation=1)
    words = worker_of(folder, "local1").cmdline()
    process.terminate()
    outcome = finish(process, folder)
    assert "fork" in words, f"not forked: {words}"
    (told,) = [event for event in outcome.events if event.kind == "fork_server_lost"]
    assert told.reason == "local1: the fork server was killed by signal 9; a new one loads"
    assert told.data == {"node": "local1", "replaced": True, "signal": 9}
    assert told.generation == 0


def test_an_agent_that_crashes_is_named_and_its_node_is_not_blamed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASHES)
    env = {"PYTHONPATH": str(tmp_path), "CRASH": str(tmp_path / "crash-")}
    known = set((site.path / "runs").glob("*"))
    words = ("train", "run.yaml", "--local", "3", "--topology", "four.json", "--set", "steps=1000000", *NO_VALIDATION)
    process = site.start(*words, env=env)
    folder = site.run_folder(known)
    wait_for_step(folder, 2)
    first = working(folder)
    (tmp_path / f"crash-{first}").touch()
    wait_for_step(folder, 1, generation=1)
    events = read_events(folder / "events.jsonl")
    (crash,) = [event for event in events if event.kind == "agent_crashed"]
    assert crash.data == {"node": first, "error": "RuntimeError"}
    assert crash.reason.startswith(f"the agent of {first} crashed: RuntimeError: the dog ate it (sitecustomize.py, ")
    start = [event for event in events if event.kind == "generation_started"][-1]
    assert start.data["members"] == others(first)
    assert start.reason == crash.reason
    for node in others(first):
        (tmp_path / f"crash-{node}").touch()
    outcome = finish(process, folder)
    assert outcome.code == 1
    assert "crashed: RuntimeError: the dog ate it" in outcome.said
    last = json.loads((folder / "attempts.jsonl").read_text().splitlines()[-1])
    assert "crashed: RuntimeError: the dog ate it" in last["reason"]
    assert last["class"] in ("fatal", "infrastructure")
    status = json.loads(site.command("status", folder.name, "--json").stdout)
    assert status["state"] == "failed"
    assert "crashed: RuntimeError: the dog ate it" in status["reason"]
    assert nodes_to_blame(outcome.events) == {}
