"""A probe that refuses its nodes ends the attempt: nothing is trained on what was not measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.node import run
from hpctrain.records.event import read_events
from hpctrain.records.topology import Device, DeviceType, Node, Provenance, Reason, Topology, Verdict

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
