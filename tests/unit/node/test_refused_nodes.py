"""A probe that refuses its nodes ends the attempt: nothing is trained on what was not measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.agent.agent import AgentIdentity
from hpctrain.agent.event_log import EventLog
from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.jobs.bad_nodes import nodes_to_blame
from hpctrain.node import run
from hpctrain.records.history.run_log import read_events
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Device, DeviceType, Node, Provenance, Reason, Topology, Verdict

RUN = {
    "steps": 1,
    "model": {"preset": "tiny-1m"},
    "data": {"train": ["/data"]},
    "batch": {"global": 8},
}


def measured(*names: str) -> Topology:
    fault = Reason(code="UNREACHABLE", text=f"{names[-1]}: it did not answer")
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[Device(id="cpu0", type="cpu")]) for name in names],
        verdict=Verdict(status="refuse", exclude=[names[-1]], faults=[fault]),
    )


def test_a_topology_at_hand_tells_whom_it_excludes(tmp_path: Path) -> None:
    """The job after this one does without them by the ledger, which is made of the events."""
    usable = measured("a", "b", "c").model_copy(update={"verdict": Verdict(status="warn", exclude=["c", "elsewhere"])})
    usable.write(tmp_path / "topology.json")
    events = tmp_path / "events.jsonl"
    for node in ("a", "b"):
        place = AgentIdentity(node, ("a", "b", "c"), "127.0.0.1", "i", 1, tmp_path)
        event_log = EventLog(events, node, 1, SystemClock())
        assert run._ensure_topology(place, Run.from_json(RUN), event_log, False, SystemRunner()) == usable
    (told,) = read_events(events)
    assert (told.kind, told.data["exclude"]) == ("probed", ["c"])
    assert nodes_to_blame([told]) == {"c": "the probe found it bad"}


@pytest.mark.parametrize("local", [True, False])
def test_an_attempt_on_nodes_that_the_probe_refuses_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    monkeypatch.setattr(run, "probe_nodes", lambda *_args: measured("a", "b"))
    monkeypatch.setattr(run._StopRequest, "listen", lambda self: None)
    words = ["--folder", str(tmp_path), "--attempt", "3", "--nodes", "a,b", "--addr", "127.0.0.1"]
    more = ["--local", "--parent", str(os.getppid())] if local else []
    assert run.main([*words, *more, "--node", "a"]) == 4
    assert run.main([*words, *more, "--node", "b"]) == 4
    events = read_events(tmp_path / "events.jsonl")
    assert [event.kind for event in events] == ["attempt_started", "probed", "failed"]
    assert events[-1].reason == "the probe refuses these nodes: b: it did not answer"
    assert events[-1].data == {"exit_code": 4, "by_probe": True}
    # The job script waits for nobody else.
    assert (tmp_path / "left" / "3.code").exists() is not local
