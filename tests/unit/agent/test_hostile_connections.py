"""Connections that are reset, half open, slow or many neither end an agent nor keep its peers out; all on loopback."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Callable

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_agents import NODES, Cluster, RawPeer, heartbeat

from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.peer_connector import publish_address, published_address
from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.peers import HANDSHAKE_TIMEOUT_S
from hpctrain.agent.tree.reading import PeerMessage, read_message
from hpctrain.base.net.authentication import SPARE_CONNECTIONS
from hpctrain.base.net.wire import MalformedMessage

pytestmark = pytest.mark.slow

TWO = NODES[:2]


def call(cluster: Cluster, node: str = "n0") -> socket.socket:
    """A connection to an agent's port, as anybody can make it."""
    address = published_address(cluster.folder, node)
    assert address is not None
    return socket.create_connection(address, timeout=1.0)


def reset(sock: socket.socket) -> None:
    """Close with RST in place of FIN."""
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def before_it_is_accepted(cluster: Cluster, sock: socket.socket) -> None:
    """Nothing."""


def after_the_challenge(cluster: Cluster, sock: socket.socket) -> None:
    cluster.turn()
    assert b"nonce" in sock.recv(65536)


def with_the_challenge_unread(cluster: Cluster, sock: socket.socket) -> None:
    cluster.turn()


def within_the_hello(cluster: Cluster, sock: socket.socket) -> None:
    cluster.turn()
    sock.sendall(b'{"type": "hello", "nonce": "00')
    cluster.turn()


def with_a_wrong_hello(cluster: Cluster, sock: socket.socket) -> None:
    cluster.turn()
    sock.sendall(json.dumps({"type": "hello", "nonce": "0" * 32, "claims": {}, "proof": "0"}).encode() + b"\n")


def after_the_proof(cluster: Cluster, sock: socket.socket) -> None:
    RawPeer(sock, "n1").meet(cluster)


def while_heartbeats_wait(cluster: Cluster, sock: socket.socket) -> None:
    peer = RawPeer(sock, "n1")
    peer.meet(cluster)
    peer.send(*[heartbeat("n1")] * 50)
    for _ in range(20):
        cluster.agents["n0"].exchange(cluster.now, at_once=True)
    peer.send(*[heartbeat("n1")] * 50)


def door_of(cluster: Cluster) -> int:
    """The descriptor of n0's listening socket, as the system lists it."""
    address = published_address(cluster.folder, "n0")
    listening = [link for link in psutil.Process().net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    return next(link.fd for link in listening if tuple(link.laddr) == address)


STAGES = [
    before_it_is_accepted,
    after_the_challenge,
    with_the_challenge_unread,
    within_the_hello,
    with_a_wrong_hello,
    after_the_proof,
    while_heartbeats_wait,
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_connection_that_is_reset_ends_itself_alone(
    cluster: Cluster, stage: Callable[[Cluster, socket.socket], None]
) -> None:
    agent = cluster.start("n0", TWO)
    for _ in range(3):
        sock = call(cluster)
        stage(cluster, sock)
        reset(sock)
        agent.peers.wait(0.001)
        cluster.turn()
    cluster.start("n1", TWO)
    cluster.until(lambda: agent.view("n1").connected, moves_s=0.01)
    assert agent.view("n1").incarnation == "n1-first"


def no_word(cluster: Cluster, sock: socket.socket) -> None:
    """Nothing."""


def half_a_challenge(cluster: Cluster, sock: socket.socket) -> None:
    sock.sendall(b'{"type": "challenge", "non')
    cluster.turn()


def a_challenge(cluster: Cluster, sock: socket.socket) -> None:
    sock.sendall(json.dumps({"type": "challenge", "nonce": "0" * 32}).encode() + b"\n")
    cluster.turn()


def a_proof(cluster: Cluster, sock: socket.socket) -> None:
    RawPeer(sock, "n0").answer(cluster, "n0")


@pytest.mark.parametrize("stage", [no_word, half_a_challenge, a_challenge, a_proof])
def test_a_node_that_was_called_and_resets_is_called_again(
    cluster: Cluster, stage: Callable[[Cluster, socket.socket], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster.folder.mkdir()
        publish_address(cluster.folder, "n0", server.getsockname())
        server.setblocking(False)
        agent = cluster.start("n1", TWO)
        calls: list[socket.socket] = []

        def called() -> bool:
            with contextlib.suppress(BlockingIOError):
                calls.append(server.accept()[0])
            return bool(calls)

        for _ in range(3):
            cluster.until(called)
            sock = calls.pop()
            sock.settimeout(1.0)
            stage(cluster, sock)
            reset(sock)
            agent.peers.wait(0.001)
            cluster.turn()
    cluster.start("n0", TWO)
    cluster.until(lambda: agent.view("n0").connected, moves_s=0.1)


def test_half_open_connections_and_slow_ones_leave_when_their_time_is_up(cluster: Cluster) -> None:
    agent = cluster.start("n0", TWO)
    with contextlib.ExitStack() as stack:
        half_open, slow, shut = [stack.enter_context(call(cluster)) for _ in range(3)]
        shut.shutdown(socket.SHUT_WR)
        for _ in range(20):
            slow.sendall(b" ")
            cluster.turn(HANDSHAKE_TIMEOUT_S / 40)
        cluster.turn(HANDSHAKE_TIMEOUT_S)
        for sock in (half_open, slow, shut):
            sock.settimeout(1.0)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass  # a time-out here means that the agent still holds it
        cluster.start("n1", TWO)
        cluster.until(lambda: agent.view("n1").connected, moves_s=0.01)


def test_bytes_without_end_from_a_stranger_are_not_kept(cluster: Cluster) -> None:
    cluster.start("n0", TWO)
    with call(cluster) as flooder:
        flooder.setblocking(False)
        sent = 0
        closed = False
        deadline = time.monotonic() + 60
        while not closed:
            assert time.monotonic() < deadline, "the agent still listens to it"
            try:
                sent += flooder.send(b"x" * 65536)
            except BlockingIOError:
                pass
            except ConnectionError:
                closed = True
            cluster.turn(0.0)


def test_a_flood_from_one_address_takes_no_seat_of_another(cluster: Cluster) -> None:
    """Linux lets a client use any address of 127.0.0.0/8: one that floods, another that is a node."""
    agent = cluster.start("n0", TWO)
    address = published_address(cluster.folder, "n0")
    assert address is not None
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(socket.create_connection(address, 1.0, ("127.0.0.2", 0)))
        cluster.turn(0.001)
        for _ in range(4):
            for _ in range(SPARE_CONNECTIONS):
                stack.enter_context(call(cluster))
            cluster.turn(0.001)
        peer = RawPeer(node, "n1")
        peer.meet(cluster)
        peer.send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected, moves_s=0.001)


def test_without_a_free_descriptor_callers_are_turned_away_and_the_agent_goes_on(
    cluster: Cluster, no_descriptors: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    agent = cluster.start("n0", TWO)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(call(cluster)) for _ in range(20)]
        door = door_of(cluster)
        with no_descriptors():
            for _ in range(3):
                cluster.turn()
            # Nobody may be left in front of the door, or every wait of the agent would end at once.
            assert not select.select([door], [], [], 0)[0]
        for caller in callers:
            caller.settimeout(1.0)
            with contextlib.suppress(ConnectionError):
                assert caller.recv(65536) == b""
    cluster.start("n1", TWO)
    cluster.until(lambda: agent.view("n1").connected, moves_s=0.01)


GOOD = json.loads(heartbeat("n1"))
DOING = [list(WorkerActivity(0, "n1:cpu0", 3, "forward", False))]


@pytest.mark.parametrize(
    "changed",
    [
        {"type": "order"},
        {"more": 1},
        {"__dataclass_self__": 1},
        {"\ud800": 1},
        {"generation": -2},
        {"generation": 1 << 40},
        {"node": ""},
        {"node": "n" * 300},
        {"reason": "x" * 1001},
        {"addr": ""},
        {"doing": [[-1, *DOING[0][1:]]]},
        {"doing": [DOING[0][:-2]]},
        {"doing": [[0, "x" * 2000, *DOING[0][2:]]]},
        {"doing": DOING * 5000},
    ],
)
def test_a_malformed_heartbeat_ends_that_connection_with_the_reason(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], changed: dict[str, object]
) -> None:
    agent = cluster.start("n0")
    with call(cluster) as sock:
        peer = RawPeer(sock, "n1")
        peer.meet(cluster)
        peer.send(heartbeat("n1", doing=DOING))
        cluster.until(lambda: agent.view("n1").connected)
        peer.send(json.dumps({**GOOD, **changed}).encode())
        cluster.until(lambda: agent.view("n1").lost)
    said = capsys.readouterr().out
    assert "the connection to n1 was closed: " in said
    assert len(said) < 500


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


KEYS = st.sampled_from([*GOOD, "more", *dir(Announcement)]) | st.text(st.characters(), max_size=20)


@given(st.dictionaries(KEYS, VALUES, max_size=3), st.lists(VALUES, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_heartbeat_is_an_announcement_or_malformed(
    changes: dict[str, object], doing: list[object]
) -> None:
    for message in (GOOD | changes, GOOD | {"doing": doing}, changes):
        with contextlib.suppress(MalformedMessage):
            assert isinstance(read_message(message), PeerMessage)


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_from_a_stranger_change_nothing(tmp_path_factory: pytest.TempPathFactory, a: bytes, b: bytes) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("agents"))
    try:
        agent = cluster.start("n0", TWO)
        with call(cluster) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(a)
                cluster.turn()
                stranger.sendall(b)
                cluster.turn()
            reset(stranger)
        cluster.turn()
        assert not agent.view("n1").connected
    finally:
        cluster.close()
