"""Whatever comes over a probe's connections, from strangers or from nodes that know the token, the probe goes on."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.net.authentication import SPARE_CONNECTIONS
from hpctrain.base.net.wire import LineChannel, MalformedMessage, Message
from hpctrain.base.process import SystemRunner
from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.settings import MIB, ProbeSettings
from hpctrain.probe.protocol.connections import ConnectionLost, PeerError, ProbeListener, StarTransport, connect
from hpctrain.probe.protocol.coordinator import Coordinator
from hpctrain.probe.protocol.messages import Answer, read_answer, read_join, read_order
from hpctrain.probe.protocol.pair_measurement import DeadlineSocket, measure_pair
from hpctrain.probe.protocol.run import ProbeMember, ProbeNode
from tools.probe_simulation.fabric import FabricSpec, SimulatedFabric
from tools.probe_simulation.tables import node_names
from tools.probe_simulation.transport import SimulatedClock, SimulatedTransport

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
SETTINGS = ProbeSettings(
    share=3, loopback=True, device="none", pings=10, bulk_bytes=MIB, bulk_s=0.0, bulk_bytes_max=MIB, slow_ratio=0.0,
    join_deadline_s=60.0, slot_deadline_s=4.0,
)  # fmt: skip


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    opened = ProbeListener("127.0.0.1", "secret", CLOCK)
    yield opened
    opened.close()


def call(listener: ProbeListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=5.0)


def reset(sock: socket.socket) -> None:
    """Close with RST in place of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def admits_a_node(listener: ProbeListener) -> None:
    """The door still lets somebody in who knows the token."""
    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(connect, "127.0.0.1", listener.port, "secret", {"node": "b"}, 10.0, CLOCK)
        admitted = listener.admit(lambda claims: claims.get("node") == "b", CLOCK.now() + 10.0)
        caller.result().close()
    assert admitted is not None
    admitted[0].close()


def challenged(listener: ProbeListener, sock: socket.socket) -> None:
    """Let the door accept a stranger and send it the challenge."""
    while not select.select([sock], [], [], 0)[0]:
        assert listener.admit(lambda claims: True, CLOCK.now() + 0.05) is None


STRANGERS: dict[str, Callable[[ProbeListener, socket.socket], object]] = {
    "silent": lambda listener, sock: None,
    "challenge read": lambda listener, sock: (challenged(listener, sock), sock.recv(100)),
    "challenge unread": lambda listener, sock: challenged(listener, sock),
    "half a hello": lambda listener, sock: sock.sendall(b'{"type": "hello", "nonce'),
    "wrong hello": lambda listener, sock: sock.sendall(
        json.dumps({"type": "hello", "nonce": "0" * 32}).encode() + b"\n"
    ),
    "nonsense": lambda listener, sock: sock.sendall(b"\xff\x00" * 500 + b"\n"),
    "deep": lambda listener, sock: sock.sendall(b'{"claims":' * 900 + b"1" + b"}" * 900 + b"\n"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("end", [reset, socket.socket.close, lambda sock: sock.shutdown(socket.SHUT_WR)])
def test_a_stranger_that_leaves_in_any_manner_holds_up_nobody(
    listener: ProbeListener, stranger: str, end: Callable[[socket.socket], None]
) -> None:
    with call(listener) as first, call(listener) as second:
        for sock in (first, second):
            STRANGERS[stranger](listener, sock)
            end(sock)
        admits_a_node(listener)


def test_a_flood_of_strangers_takes_no_more_descriptors_than_there_are_seats(listener: ProbeListener) -> None:
    before = psutil.Process().num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            for _ in range(SPARE_CONNECTIONS):
                stack.enter_context(call(listener))
            listener.admit(lambda claims: True, CLOCK.now() + 0.05)
        ours = psutil.Process().num_fds() - before - 3 * SPARE_CONNECTIONS
        assert ours <= SPARE_CONNECTIONS + 1
        admits_a_node(listener)


def test_without_a_free_descriptor_nobody_is_left_in_front_of_the_door(
    listener: ProbeListener, no_descriptors: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    listening = [link for link in psutil.Process().net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    number = next(link.fd for link in listening if link.laddr.port == listener.port)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(call(listener))
        with no_descriptors():
            while select.select([number], [], [], 0)[0]:  # without end where callers are left there
                assert listener.admit(lambda claims: True, CLOCK.now() + 0.05) is None
    admits_a_node(listener)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b'{"type": "chal',
        json.dumps({"type": "challenge", "nonce": "0" * 32}).encode() + b"\n",
        json.dumps({"type": "challenge", "nonce": "0" * 32}).encode() + b"\n{}\n",
        b"x" * 200_000,
    ],
)
@pytest.mark.parametrize("end", [reset, socket.socket.close])
def test_who_answers_a_call_and_leaves_is_a_broken_connection(
    words: bytes, end: Callable[[socket.socket], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        caller = pool.submit(connect, "127.0.0.1", server.getsockname()[1], "secret", {}, 5.0, CLOCK)
        sock = server.accept()[0]
        with contextlib.suppress(ConnectionError):
            sock.sendall(words)
        end(sock)
        with pytest.raises(PeerError, match=r"closed the connection|does not know the token|cannot connect"):
            caller.result()


GOOD_JOIN = {"kind": "join", "node": "n1", "addr": "127.0.0.1", "port": 5000, "iface": "lo", "host": "h"}
GOOD_FIGURES = {
    "latency": {"min": 1e-5, "p50": 1e-5, "p95": 1e-5},
    "bytes_per_s": 1e9,
    "n": 8,
    "ladder": [[1024, 1e-4]],
}
GOOD_REPORT = {
    "devices": [{"id": "cpu0", "type": "cpu", "flops": {"fp32": 1e9}, "memory_bytes": 1e9, "launch_s": 1e-6}],
    "device_types": {"cpu": {"kind": "cpu", "name": "a processor"}},
}
GOOD_ANSWERS: list[Message] = [
    {"kind": "pair", "round": 0, "figures": GOOD_FIGURES},
    {"kind": "pair", "round": 0, "error": "the peer died"},
    {"kind": "ready"},
    {"kind": "devices", "report": GOOD_REPORT},
    {"kind": "rendezvous", "port": 5001},
    {"kind": "exchange", "report": {"backend": "gloo", "times": {"1": [[8, 1e-5], [1024, 2e-5]]}}},
]
GOOD_ORDERS: list[Message] = [
    {"kind": "pair", "round": 0, "caller": True, "peer": "n1", "addr": "127.0.0.1", "port": 5000},
    {"kind": "over"},
    {"kind": "rendezvous", "addr": "127.0.0.1"},
    {
        "kind": "exchange", "backend": "gloo", "world": 2, "seed": 0, "addr": "127.0.0.1", "port": 1, "token": "x",
        "rank": 0,
    },
]  # fmt: skip


def test_the_messages_of_this_program_are_read() -> None:
    assert read_join(GOOD_JOIN).node == "n1"
    assert [read_answer(message).kind for message in GOOD_ANSWERS] == [item["kind"] for item in GOOD_ANSWERS]
    assert [read_order(message).kind for message in GOOD_ORDERS] == [item["kind"] for item in GOOD_ORDERS]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "format"},
        {"kind": ["pair"]},
        {"kind": "a\nb\x1b[2J"},
        {"kind": "ready", "a\nb\x1b[2J": 1},
        {"kind": "pair", "round": 0},
        {"kind": "pair", "round": -1, "error": "x"},
        {"kind": "pair", "round": 0, "error": "x" * 3000},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES, "error": "x"},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES | {"bytes_per_s": 0}},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES | {"n": 0}},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES | {"latency": {"min": 0, "p50": 0, "p95": 0}}},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES | {"ladder": [[1024, 1e-4], [1024, 1e-4]]}},
        {"kind": "pair", "round": 0, "figures": GOOD_FIGURES | {"ladder": [[size, 1.0] for size in range(1, 99)]}},
        {"kind": "rendezvous", "port": 0},
        {"kind": "rendezvous", "port": 1 << 16},
        {"kind": "devices", "report": GOOD_REPORT | {"device_types": {}}},
        {"kind": "devices", "report": GOOD_REPORT | {"devices": 2 * GOOD_REPORT["devices"]}},
        {"kind": "devices", "report": GOOD_REPORT | {"devices": [{"id": "c", "type": "cpu", "flops": {"fp32": 0}}]}},
        {"kind": "exchange", "report": {"backend": "gloo", "times": {"1": [[8, 1e-5], [8, 2e-5]]}}},
    ],
)
def test_a_malformed_answer_is_told_in_one_short_line(message: Message) -> None:
    with pytest.raises(MalformedMessage, match="it sent a malformed message") as error:
        read_answer(message)
    assert len(str(error.value)) < 600
    assert str(error.value).isprintable()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, messages: list[Message]) -> Message:
    """A message of the program in which something, anywhere, was replaced, added or left out."""
    message = copy.deepcopy(draw(st.sampled_from(messages)))
    place: object = message
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        key = draw(st.sampled_from([*keys, "more"]) if isinstance(place, dict) else st.sampled_from(keys or [0]))
        inner = place.get(key) if isinstance(place, dict) else place[key] if place else None  # type: ignore[index]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place = inner
            continue
        if not place or draw(st.integers(0, 4)):
            if place or isinstance(place, dict):
                place[key] = draw(VALUES)  # type: ignore[index]
        elif isinstance(place, dict):
            place.pop(key, None)
        return message


@given(changed([GOOD_JOIN]), changed(GOOD_ORDERS), changed(GOOD_ANSWERS))
@settings(max_examples=300)
def test_any_message_is_read_or_malformed(join: Message, order: Message, answer: Message) -> None:
    for read, message in ((read_join, join), (read_order, order), (read_answer, answer)):
        with contextlib.suppress(MalformedMessage):
            read(message)


class Meddling(SimulatedTransport):
    """A simulated fabric in which one answer of each kind arrives changed."""

    def __init__(self, answers: dict[str, Message], *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._answers = dict(answers)
        self._refused: set[str] = set()

    def receive(self, seconds: float) -> Iterator[tuple[str, Answer | ConnectionLost]]:
        for name, answer in super().receive(seconds):
            if name in self._refused:
                continue
            if isinstance(answer, ConnectionLost) or answer.kind not in self._answers:
                yield name, answer
                continue
            message = self._answers.pop(answer.kind)
            if "round" in message and hasattr(answer, "round"):
                message = message | {"round": answer.round}
            try:
                yield name, read_answer(message)
            except MalformedMessage as error:
                self._refused.add(name)
                yield name, ConnectionLost(str(error))


@given(st.lists(changed(GOOD_ANSWERS), min_size=1, max_size=4))
@settings(max_examples=80)
def test_whatever_nodes_answer_the_probe_ends_with_a_topology(answers: list[Message]) -> None:
    names, clock = node_names(4), SimulatedClock()
    plan = ProbeSettings(device="cpu")
    changed_answers = {str(message.get("kind")): message for message in answers}
    transport = Meddling(changed_answers, SimulatedFabric(FabricSpec(4)), names, clock, plan)
    outcome = Coordinator(transport, names, clock, plan).run()
    topology = assemble(outcome, plan, 0.0)
    assert topology.from_json(json.loads(json.dumps(topology.to_json(), allow_nan=False)), "it") == topology


def serve(listener: ProbeListener, node: str, meddle: Callable[[LineChannel, Message], bool], tmp: Path) -> None:
    """A real node that joins the coordinator behind `listener`; `meddle` may take over an order."""
    own = ProbeListener("127.0.0.1", "secret", CLOCK)
    claims = {"kind": "join", "node": node, "addr": "127.0.0.1", "port": own.port}
    channel = connect("127.0.0.1", listener.port, "secret", claims, 5.0, CLOCK)
    member = ProbeMember(ProbeNode(node, "127.0.0.1", tmp, SETTINGS, SystemRunner(), CLOCK), channel, own)
    taken = channel.wait_message

    def wait(timeout_s: float | None) -> Message | None:
        message = taken(timeout_s)
        return None if message is not None and meddle(channel, message) else message

    channel.wait_message = wait  # type: ignore[method-assign]
    try:
        member.serve()
    except HpctrainError:
        pass
    finally:
        channel.close()
        own.close()


BAD_WORDS: dict[str, Callable[[LineChannel], object]] = {
    "unknown": lambda channel: channel.send({"kind": "format", "disk": "/dev/sda"}),
    "without a kind": lambda channel: channel.send({}),
    "kind of a wrong type": lambda channel: channel.send({"kind": ["pair"]}),
    "figures that are none": lambda channel: channel.send({"kind": "pair", "round": 0, "figures": {"n": "many"}}),
    "no object": lambda channel: channel.sock.sendall(b"[]\n"),
    "without its MAC": lambda channel: channel.sock.sendall(b'{"kind": "ready"}\n'),
    "a reset": lambda channel: reset(channel.sock),
}


@pytest.mark.parametrize("words", BAD_WORDS)
def test_a_node_that_says_nonsense_is_lost_with_the_reason_and_the_others_are_measured(
    words: str, tmp_path: Path
) -> None:
    listener = ProbeListener("127.0.0.1", "secret", CLOCK, 3)
    names = ["n0", "n1", "n2"]

    def meddle(channel: LineChannel, message: Message) -> bool:
        BAD_WORDS[words](channel)
        return True

    threads = [
        threading.Thread(target=serve, args=(listener, name, meddle if name == "n1" else lambda *_: False, tmp_path))
        for name in names
    ]
    for thread in threads:
        thread.start()
    coordinator = Coordinator(StarTransport(listener), names, CLOCK, SETTINGS)
    try:
        outcome = coordinator.run()
    finally:
        coordinator.close()
        listener.close()
        for thread in threads:
            thread.join(30)
    assert set(outcome.lost) == {"n1"}
    told = outcome.lost["n1"]
    assert "its process ended" in told if words == "a reset" else "it sent a" in told
    assert assemble(outcome, SETTINGS, 0.0).verdict.exclude == ["n1"]


@pytest.mark.parametrize(
    "message", [{}, {"kind": "pair"}, {"kind": "pair", "round": 0, "caller": True, "peer": "n1"}, {"kind": ["over"]}]
)
def test_a_node_leaves_a_coordinator_that_says_nonsense_with_the_reason(
    message: Message, listener: ProbeListener
) -> None:
    ours, theirs = map(LineChannel, socket.socketpair())
    member = ProbeMember(ProbeNode("n0", "127.0.0.1", Path(), SETTINGS, SystemRunner(), CLOCK), ours, listener)
    theirs.send(message)
    with pytest.raises(HpctrainError, match="it sent a malformed message"):
        member.serve()
    theirs.close()


@pytest.mark.parametrize("byte", [b"\x00", b"\x01", b"\xff"])
@pytest.mark.parametrize("caller", [True, False])
def test_a_peer_that_sends_any_bytes_without_end_costs_its_slot_and_nothing_else(byte: bytes, caller: bool) -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()
    theirs.settimeout(0.05)

    def pour_and_drain() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                theirs.send(byte * 65536)
            with contextlib.suppress(OSError):
                theirs.recv(65536)

    thread = threading.Thread(target=pour_and_drain)
    thread.start()
    try:
        deadline = CLOCK.now() + 0.5
        with contextlib.suppress(PeerError):
            figures = measure_pair(DeadlineSocket(ours, CLOCK, deadline), caller, replace(SETTINGS, ping_limit_s=0.05))
            assert figures.clock_offset_s is None or math.isfinite(figures.clock_offset_s)
    finally:
        stop.set()
        thread.join()
        ours.close()
        theirs.close()
