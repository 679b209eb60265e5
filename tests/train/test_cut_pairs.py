"""Two nodes of a local run that do not hear each other: one of them is left out, and the run goes on in its job.

The agents' messages to each other are dropped where they arrive, for as long as the file CUT names their pair.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from train_site import Outcome, Site, kill_worker, small_topology, wait_for_step

from hpctrain.jobs.bad_nodes import nodes_to_blame
from hpctrain.records.history.run_log import Event, last_row_of_each_step, read_events

pytestmark = pytest.mark.slow

DEAF = """
import os, sys
if "hpctrain.node" in " ".join(sys.orig_argv):
    from pathlib import Path
    from hpctrain.agent import peers
    hear = peers.PeerMesh._receive
    def deaf(self, now, node, channel):
        cut = Path(os.environ["CUT"])
        if {self._me, node} == set(cut.read_text().split() if cut.exists() else ()):
            channel.receive()
            return None
        return hear(self, now, node, channel)
    peers.PeerMesh._receive = deaf
"""
QUICK = ("--set", "recovery.heartbeat_timeout_s=3", "--set", "validation.batches=0", "--set", "recovery.retries=99")


def generations(folder: Path) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event.kind == "generation_started"]


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    return tmp_path / "cut"


def environment(cut: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(cut.parent), "CUT": str(cut)}


def finish(process, folder: Path) -> Outcome:  # type: ignore[no-untyped-def]
    said, _ = process.communicate(timeout=800)
    return Outcome(process.returncode, folder, said)


def test_a_pair_cut_during_a_run_costs_one_of_both_until_it_is_healed(site: Site, cut: Path) -> None:
    known = set((site.path / "runs").glob("*"))
    words = ("train", "run.yaml", "--local", "3", "--topology", "four.json", "--set", "steps=1000000", *QUICK)
    process = site.start(*words, env=environment(cut))
    folder = site.run_folder(known)
    wait_for_step(folder, 2)
    cut.write_text("local1 local2")
    wait_for_step(folder, 1, generation=1)
    assert generations(folder)[1].data["members"] == ["local0", "local1"]
    (told,) = [event for event in read_events(folder / "events.jsonl") if event.kind == "node_left_out"]
    assert told.data["node"] == "local2"
    assert told.reason == "local2 is left out: it and local1 do not hear each other"
    # The cut lasts: who is out stays out, whatever else happens.
    kill_worker(folder, "local0")
    wait_for_step(folder, 1, generation=2)
    assert generations(folder)[2].data["members"] == ["local0", "local1"]
    cut.unlink()
    # Healed, it is taken in again by a generation that begins once both have heard each other.
    while "local2" not in generations(folder)[-1].data["members"]:
        number = generations(folder)[-1].generation
        kill_worker(folder, "local0")
        wait_for_step(folder, 1, generation=number + 1)
    process.terminate()
    outcome = finish(process, folder)
    kinds = [event.kind for event in outcome.events]
    assert (kinds.count("node_left_out"), kinds.count("node_returned")) == (1, 1), outcome.said
    assert "node_lost" not in kinds
    # local0 may be: its workers were killed.
    assert {"local1", "local2"}.isdisjoint(nodes_to_blame(outcome.events))


def test_a_link_that_the_probe_could_not_measure_is_in_no_plan(site: Site) -> None:
    whole = small_topology(3)
    fabric = whole.fabric.model_copy(update={"broken": [("local0", "local1")]})
    whole.model_copy(update={"fabric": fabric}).write(site.path / "cut.json")
    done = site.train("run.yaml", "--local", "3", "--topology", "cut.json", "--set", "steps=5")
    assert done.code == 0, done.said
    (start,) = [event for event in done.events if event.kind == "generation_started"]
    assert start.data["members"] == ["local0", "local2"]
    (told,) = [event for event in done.events if event.kind == "node_left_out"]
    assert told.reason == "local1 is left out: the probe could not measure its link to local0"
    assert [row.step for row in last_row_of_each_step(done.rows)] == [1, 2, 3, 4, 5]
    assert nodes_to_blame(done.events) == {}
