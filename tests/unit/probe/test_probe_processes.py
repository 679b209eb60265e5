"""A whole probe over real TCP, with the nodes as threads and a measuring process that is a thread as well."""

import socket
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError, HpctrainError, InputError
from hpctrain.base.net.wire import LineChannel, Message
from hpctrain.probe.measure.settings import MIB, ProbeSettings
from hpctrain.probe.protocol.messages import PairOrder
from hpctrain.probe.protocol.run import ProbeMember, ProbeNode, probe_nodes

SETTINGS = ProbeSettings(
    share=3,
    loopback=True,
    slow_ratio=0.0,
    pings=10,
    bulk_bytes=MIB,
    bulk_s=0.0,
    bulk_bytes_max=MIB,
    join_deadline_s=60.0,
    slot_deadline_s=60.0,
    devices_deadline_s=60.0,
)
NODES = ["n0", "n1", "n2"]
REPORT = {
    "devices": [{"id": "cpu0", "type": "cpu", "flops": {"fp32": 1e9}, "memory_bytes": 1e9}],
    "device_types": {"cpu": {"kind": "cpu", "name": "a processor"}},
}


class Ended:
    pid = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout_s: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


class MeasuringRunner:
    """Starts 'processes' that answer as hpctrain.worker measure does, once told to go."""

    def __init__(self, answer: dict | None = None) -> None:
        self.argvs: list[list[str]] = []
        self._answer = {"kind": "devices", "report": REPORT} if answer is None else answer

    def run(self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None):
        raise NotImplementedError

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Ended:
        self.argvs.append(list(argv))
        channel = LineChannel(socket.fromfd(keep_fds[0], socket.AF_UNIX, socket.SOCK_STREAM))
        threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
        return Ended()

    def _serve(self, channel: LineChannel) -> None:
        channel.send({"kind": "ready"})
        if channel.wait_message(60.0) == {"kind": "go"}:
            channel.send(self._answer)
        channel.close()


class HangingRunner(MeasuringRunner):
    """Its processes measure devices, open a meeting, and say no more."""

    def _serve(self, channel: LineChannel) -> None:
        channel.send({"kind": "ready"})
        while (message := channel.wait_message(60.0)) is not None:
            if message["kind"] == "go":
                channel.send(self._answer)
            elif message["kind"] == "rendezvous":
                channel.send({"kind": "rendezvous", "port": 1})


class NoRunner(MeasuringRunner):
    def start(self, argv, env=None, log=None, keep_fds=()):
        raise CommandError("python: cannot start: no memory")


def probe(folder: Path, who: Sequence[str] = NODES, settings: ProbeSettings = SETTINGS, runner=None, progress=None):
    """Every node of `who` takes part; the result of each in order."""
    with ThreadPoolExecutor(len(who)) as pool:
        parts = [
            pool.submit(
                probe_nodes,
                ProbeNode(me, "127.0.0.1", folder, settings, runner or MeasuringRunner(), SystemClock()),
                NODES,
                progress if me == NODES[0] else None,
            )
            for me in who
        ]
        return [part.result(timeout=600) for part in parts]


def test_the_first_node_gets_the_topology_and_nothing_is_left(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    threads, runner = threading.active_count(), MeasuringRunner()

    topology, *others = probe(tmp_path, runner=runner, progress=lambda *step: seen.append(step))

    assert others == [None, None]
    assert [node.id for node in topology.nodes] == NODES
    assert {(link.a, link.b) for link in topology.fabric.links} == {("n0", "n1"), ("n0", "n2"), ("n1", "n2")}
    assert all(link.ab.isolated_bytes_per_s > 0 and link.ba.latency_s.p50 > 0 for link in topology.fabric.links)
    assert topology.device_ids() == ["n0:cpu0", "n1:cpu0", "n2:cpu0"]
    assert (topology.provenance.rounds_done, topology.provenance.rounds_planned) == (3, 3)
    assert topology.verdict.status == "go"
    assert [node.iface for node in topology.nodes] == ["lo"] * 3
    assert all(node.host_facts.mtu["lo"] > 1000 for node in topology.nodes)
    assert abs(topology.node("n1").host_facts.clock_offset_s) < 0.1
    assert all(argv[argv.index("--share") + 1] == "3" for argv in runner.argvs)
    assert ("links", 2, 3) in seen
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 60  # for the threads of processes, which have answered
    while threading.active_count() > threads + 1:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_a_node_that_never_comes_is_bad_and_the_rest_is_measured(tmp_path: Path) -> None:
    topology = probe(tmp_path, who=["n0", "n1"], settings=replace(SETTINGS, join_deadline_s=3.0))[0]

    assert topology.verdict.exclude == ["n2"]
    assert "did not join within 3 s" in topology.node("n2").health.reasons[0].text
    assert [(link.a, link.b) for link in topology.fabric.links] == [("n0", "n1")]
    assert (topology.provenance.rounds_done, topology.provenance.rounds_planned) == (1, 3)


@pytest.mark.parametrize(("fails", "broken"), [(1, []), (2, [("n0", "n2")])])
def test_a_pair_that_cannot_measure_tries_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, broken: list[tuple[str, str]]
) -> None:
    measure, tried = ProbeMember._pair, []

    def cut(member: ProbeMember, order: PairOrder) -> Message:
        if {member._node.name, order.peer} == {"n0", "n2"} and tried.count(member._node.name) < fails:
            tried.append(member._node.name)
            return {"kind": "pair", "round": order.round, "error": "nothing came"}
        return measure(member, order)

    monkeypatch.setattr(ProbeMember, "_pair", cut)
    topology = probe(tmp_path)[0]
    assert topology.fabric.broken == broken
    assert len(topology.fabric.links) == 3 - len(broken)
    assert topology.verdict.exclude == []
    assert any("link n0 - n2: " in fault.text for fault in topology.verdict.faults) == bool(broken)


def test_devices_that_cannot_be_measured_leave_the_links(tmp_path: Path) -> None:
    topology = probe(tmp_path, runner=NoRunner())[0]

    assert len(topology.fabric.links) == 3
    assert topology.verdict.status == "refuse"
    assert "no memory" in topology.node("n1").health.reasons[0].text


def test_the_error_of_the_measuring_process_is_passed_on(tmp_path: Path) -> None:
    runner = MeasuringRunner({"kind": "error", "text": "torch finds no CUDA device here"})

    topology = probe(tmp_path, runner=runner)[0]

    assert "no CUDA device" in topology.node("n0").health.reasons[0].text


def test_processes_that_hang_in_their_messages_cost_the_deadline_and_nothing_else(tmp_path: Path) -> None:
    topology = probe(tmp_path, settings=replace(SETTINGS, backend_deadline_s=2.0), runner=HangingRunner())[0]

    assert topology.verdict.status == "go"
    assert topology.device_ids() == ["n0:cpu0", "n1:cpu0", "n2:cpu0"]
    assert len(topology.provenance.notes) == 3
    assert "not 'exchange' in time" in topology.provenance.notes[0]
    assert all(side.backend == {} for link in topology.fabric.links for side in (link.ab, link.ba))


def test_links_alone_start_no_measuring_process(tmp_path: Path) -> None:
    runner = MeasuringRunner()

    topology = probe(tmp_path, settings=replace(SETTINGS, device="none"), runner=runner)[0]

    assert runner.argvs == []
    assert topology.verdict.status == "go"


def test_what_an_earlier_killed_probe_left_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "coordinator.json").write_text('{"addr": "127.0.0.1", "port": 1, "token": "old"}')

    assert probe(tmp_path)[0].verdict.status == "go"


def test_the_token_is_for_its_owner_only(tmp_path: Path) -> None:
    modes: list[int] = []

    def look(phase: str, done: int, planned: int) -> None:
        modes.append(stat.S_IMODE((tmp_path / "probe" / "coordinator.json").stat().st_mode))

    probe(tmp_path, progress=look)

    assert set(modes) == {0o600}


def test_without_its_first_node_the_others_say_so(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"n1 found no coordinating node within 0\.3 s"):
        probe(tmp_path, who=["n1"], settings=replace(SETTINGS, join_deadline_s=0.3))


def test_a_foreign_address_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"192\.0\.2\.1"):
        probe_nodes(ProbeNode("n0", "192.0.2.1", tmp_path, SETTINGS, MeasuringRunner(), SystemClock()), NODES)
