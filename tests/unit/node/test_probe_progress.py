"""A probe before the training tells in the run's events which part is under way, and how far it is."""

from __future__ import annotations

from pathlib import Path

from hpctrain.agent.event_log import EventLog
from hpctrain.node.run import EVERY_S, ProbeProgress
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.coordinator import Coordinator
from hpctrain.records.history.run_log import read_events
from hpctrain.records.run.run import Run
from hpctrain.report.status import decide_status
from hpctrain.report.watch.changes import PlainView
from tools.probe_simulation.fabric import FabricSpec, SimulatedFabric
from tools.probe_simulation.tables import node_names
from tools.probe_simulation.transport import SimulatedClock, SimulatedTransport

RUN = {
    "steps": 5,
    "model": {"dims": {"layers": 1, "dim": 8, "heads": 1}},
    "data": {"train": ["data"], "seq_len": 8},
    "batch": {"global": 1},
}


def words(folder: Path) -> list[str]:
    return [event.reason for event in read_events(folder / "events.jsonl")]


def progress(folder: Path, clock: SimulatedClock) -> ProbeProgress:
    return ProbeProgress(EventLog(folder / "events.jsonl", "n0", 1, clock), clock)


def test_each_part_is_told_when_it_begins_and_then_a_quarter_at_a_time(tmp_path: Path) -> None:
    clock = SimulatedClock()
    tell = progress(tmp_path, clock)
    tell("links", 0, 0)
    for done in range(41):
        tell("links", done, 40)
        clock.sleep(EVERY_S / 8)
    tell("devices", 0, 4)
    tell("devices", 4, 4)
    assert words(tmp_path) == [
        "the links between the nodes, 0 of 40 rounds are done",
        "the links between the nodes, 10 of 40 rounds are done",
        "the links between the nodes, 20 of 40 rounds are done",
        "the links between the nodes, 30 of 40 rounds are done",
        "the links between the nodes, 40 of 40 rounds are done",
        "the devices, 0 of 4 nodes have loaded what measures them",
    ]


def test_a_whole_probe_is_seen_in_status_and_watch(tmp_path: Path) -> None:
    names, clock, settings = node_names(8), SimulatedClock(), ProbeSettings(device="cpu")
    view, run = PlainView(), Run.from_json(RUN)
    seen: list[str] = []
    tell = progress(tmp_path, clock)

    def look(phase: str, done: int, planned: int) -> None:
        tell(phase, done, planned)
        events = read_events(tmp_path / "events.jsonl")
        status = decide_status(run, events, [], clock.wall(), True)
        assert status.state == "starting"
        assert status.reason.startswith("probing: ")
        seen.extend(view.lines(status, events[len(told) :], clock.wall()))
        told[:] = events

    told: list[object] = []
    transport = SimulatedTransport(SimulatedFabric(FabricSpec(8)), names, clock, settings)
    Coordinator(transport, names, clock, settings, look).run()
    parts = ["0 of 8 nodes have come", "the links between the nodes", "the devices", "messages over the training"]
    assert [any(part in line for line in seen) for part in parts] == [True] * 4
    assert len(seen) == len(set(seen))
