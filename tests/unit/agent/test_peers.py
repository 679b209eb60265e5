"""Agents find each other and stay informed, whatever else hangs, lies or knocks; all traffic is on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import replace

import pytest
from loopback_agents import KEY, NODES, Cluster, RawPeer, heartbeat

from hpctrain.agent.agreement_messages import REASON_CHARS
from hpctrain.agent.peer_connector import publish_address, published_address
from hpctrain.agent.peers import HANDSHAKE_TIMEOUT_S, attempt_key
from hpctrain.base.net.authentication import SPARE_CONNECTIONS, HandshakeClient
from hpctrain.base.net.wire import LineChannel

NEVER_S = 600.0
"""Longer than a test may take: who waits so long where nobody should wait fails by the suite's own limit."""


def call(cluster: Cluster, node: str = "n0") -> socket.socket:
    """A connection to an agent's port, as anybody can make it."""
    address = published_address(cluster.folder, node)
    assert address is not None
    return socket.create_connection(address, timeout=1.0)


def hello(proof: object = "0" * 64, node: object = "n1", nonce: object = "0" * 32) -> bytes:
    """The hello of somebody who does not know the key."""
    return json.dumps({"type": "hello", "nonce": nonce, "claims": {"node": node}, "proof": proof}).encode() + b"\n"


def met(cluster: Cluster, sock: socket.socket, node: str = "n1") -> RawPeer:
    """A connection over which the agent n0 takes the test for a node that knows the key."""
    peer = RawPeer(sock, node)
    peer.meet(cluster)
    return peer


def is_shut(sock: socket.socket) -> bool:
    """Whether the other side closed the connection (what it sent before is thrown away)."""
    sock.settimeout(0.01)
    with contextlib.suppress(TimeoutError):
        try:
            while sock.recv(65536):
                pass
        except ConnectionError:
            return True
        return True
    return False


@pytest.mark.parametrize("nodes", [NODES[:2], NODES])
def test_agents_meet_and_tell_each_other_how_they_are(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    for node in nodes:
        cluster.start(node, nodes)
    cluster.all_meet()
    agents = cluster.agents
    for agent in agents.values():
        for view in agent.peers.views():
            assert view == agents[view.node].says.seen(view.last_seen)
            assert (view.incarnation, view.phase, view.lost) == (f"{view.node}-first", "joining", False)
    agents["n1"].says = agents["n1"].says.model_copy(
        update={"generation": 3, "phase": "fault", "reason": "ü" * REASON_CHARS}
    )
    agents["n1"].exchange(cluster.now, at_once=True)
    cluster.until(lambda: agents["n0"].view("n1").phase == "fault")
    assert agents["n0"].view("n1").generation == 3
    assert agents["n0"].view("n1").reason == "ü" * REASON_CHARS


def test_a_heartbeat_goes_out_every_quarter_of_a_second_and_not_more_often(cluster: Cluster) -> None:
    cluster.start("n0", NODES[:2])
    cluster.start("n1", NODES[:2])
    cluster.all_meet()
    seen = set()
    for _ in range(100):
        cluster.turn(0.01)
        seen.add(cluster.agents["n0"].view("n1").last_seen)
    assert 4 <= len(seen) <= 6


def test_waiting_ends_when_a_peer_speaks(cluster: Cluster) -> None:
    one, other = cluster.start("n0", NODES[:2]), cluster.start("n1", NODES[:2])
    cluster.all_meet()
    one.exchange(cluster.now)
    other.exchange(cluster.now, at_once=True)
    one.peers.wait(NEVER_S)


@pytest.mark.parametrize(
    "keys", [(KEY, "another run's key"), (attempt_key(KEY, 1), attempt_key(KEY, 0))], ids=["run", "attempt"]
)
def test_who_has_another_key_never_becomes_a_peer(cluster: Cluster, keys: tuple[str, str]) -> None:
    cluster.start("n0", NODES[:2], key=keys[0])
    cluster.start("n1", NODES[:2], key=keys[1])
    for _ in range(40):
        cluster.turn()
        time.sleep(0.001)
    assert not cluster.agents["n0"].view("n1").connected
    assert not cluster.agents["n1"].view("n0").connected
    assert not cluster.agents["n1"].view("n0").lost


@pytest.mark.parametrize(
    "raw",
    [
        hello(proof="é"),
        hello(proof="\ud800"),
        hello(proof=None),
        hello(proof=["x"]),
        hello(proof=KEY),
        hello(nonce=None),
        hello(nonce=["0"]),
        hello(nonce=""),
        b'{"type":"hello","nonce":"\xc3\xa9"}\n',
        b"{}\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xfe\n",
        b"[" * 12_000 + b"\n",
        b"[" * 50_000 + b"\n",
        b'{"a":' * 3_000 + b"\n",
        b"x" * 200_000,
        heartbeat("n1") + b"\n",
    ],
)
def test_a_stranger_is_shown_the_door_and_changes_nothing(cluster: Cluster, raw: bytes) -> None:
    agent = cluster.start("n0")
    cluster.start("n1")
    cluster.start("n2")
    cluster.all_meet()
    before = replace(agent.view("n1"), last_seen=0.0)
    with call(cluster) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(raw)
        cluster.until(lambda: is_shut(stranger), moves_s=0.001)
    cluster.turn()
    assert replace(agent.view("n1"), last_seen=0.0) == before


@pytest.mark.parametrize("node", [["n1"], {"n1": 1}, "nobody", "n0", None])
def test_who_knows_the_key_but_is_no_other_node_of_the_run_is_shown_the_door(cluster: Cluster, node: object) -> None:
    cluster.start("n0")
    with call(cluster) as stranger:
        proof, channel = HandshakeClient(KEY.encode(), {"node": node, "to": "n0"}), LineChannel(stranger)
        cluster.turn()
        hello = proof.answer_challenge(channel.wait_message(1.0) or {})
        assert hello is not None
        channel.send(hello)
        cluster.until(lambda: is_shut(stranger), moves_s=0.001)
    assert not any(view.connected for view in cluster.agents["n0"].peers.views())


@pytest.mark.parametrize("to", ["n2", "n1", None])
def test_a_call_that_was_meant_for_another_node_puts_no_living_connection_away(cluster: Cluster, to: object) -> None:
    """Whoever took the port of n2, which died, passes on what n1 says there to n0."""
    cluster.start("n0")
    cluster.start("n1")
    views = [cluster.agents["n0"].view, cluster.agents["n1"].view]
    cluster.until(lambda: views[0]("n1").connected and views[1]("n0").connected)
    with call(cluster) as relay:
        proof, channel = HandshakeClient(KEY.encode(), {"node": "n1", "to": to}), LineChannel(relay)
        cluster.turn()
        hello = proof.answer_challenge(channel.wait_message(1.0) or {})
        assert hello is not None
        channel.send(hello)
        lost: list[str] = []

        def shut() -> bool:
            lost.extend(node for view, node in zip(views, ("n1", "n0"), strict=True) if view(node).lost)
            return is_shut(relay)

        cluster.until(shut, moves_s=0.001)
    assert lost == []


def test_the_key_is_not_sent_and_a_stranger_sees_a_nonce_alone(cluster: Cluster) -> None:
    agent = cluster.start("n0")
    with call(cluster) as stranger:
        stranger.settimeout(1.0)
        cluster.turn()
        seen = json.loads(stranger.recv(65536))
    assert set(seen) == {"type", "nonce"}
    with call(cluster) as sock:
        wire = met(cluster, sock)
        wire.send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        agent.exchange(cluster.now, at_once=True)
        sock.settimeout(1.0)
        assert KEY.encode() not in sock.recv(65536)


def test_a_port_taken_over_by_somebody_without_the_key_is_no_peer(cluster: Cluster) -> None:
    """The agent proves itself only with a proof that is of no use elsewhere, and believes nothing it is told."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster.folder.mkdir(exist_ok=True)
        publish_address(cluster.folder, "n0", taken.getsockname())
        agent = cluster.start("n1", NODES[:2])
        cluster.turn()
        cluster.turn()
        taken.settimeout(1.0)
        connection = taken.accept()[0]
        connection.sendall(json.dumps({"type": "challenge", "nonce": "0" * 32}).encode() + b"\n")
        for _ in range(3):
            cluster.turn(0.001)
            time.sleep(0.001)
        connection.settimeout(1.0)
        assert KEY.encode() not in connection.recv(65536)
        welcome = {"type": "welcome", "claims": {"node": "n0"}, "proof": "0" * 64}
        connection.sendall(json.dumps(welcome).encode() + b"\n" + heartbeat("n0") + b"\n")
        cluster.until(lambda: is_shut(connection), moves_s=0.001)
        connection.close()
    assert (agent.view("n0").connected, agent.view("n0").lost) == (False, False)


def test_a_long_first_heartbeat_right_behind_the_proof_is_taken(cluster: Cluster) -> None:
    for node in NODES[:2]:
        agent = cluster.start(node, NODES[:2])
        agent.says = agent.says.model_copy(update={"reason": "ü" * REASON_CHARS})
    cluster.all_meet()
    assert not any(agent.peers.views()[0].lost for agent in cluster.agents.values())


def test_a_line_changed_repeated_or_put_in_ends_the_connection(cluster: Cluster) -> None:
    agent = cluster.start("n0")
    for attack in (
        lambda peer: peer.sealed(heartbeat("n1")).replace(b"running", b"stopped"),
        lambda peer: 2 * peer.sealed(heartbeat("n1")),
        lambda peer: heartbeat("n1") + b"\n",
        lambda peer: b"\n",
    ):
        with call(cluster) as sock:
            peer = met(cluster, sock)
            peer.send(heartbeat("n1"))
            cluster.until(lambda: agent.view("n1").connected)
            sock.sendall(attack(peer))
            cluster.until(lambda: agent.view("n1").lost, moves_s=0.001)
            assert agent.view("n1").phase == "running"


def test_a_stranger_that_says_nothing_has_two_seconds(cluster: Cluster) -> None:
    agent = cluster.start("n0")
    with call(cluster) as silent, call(cluster) as mumbler:
        mumbler.sendall(b'{"type": "hel')
        agent.exchange(cluster.now)
        agent.exchange(cluster.now + HANDSHAKE_TIMEOUT_S - 0.1)
        assert not is_shut(silent)
        assert not is_shut(mumbler)
        agent.exchange(cluster.now + HANDSHAKE_TIMEOUT_S + 0.1)
        assert is_shut(silent)
        assert is_shut(mumbler)


def test_a_crowd_of_strangers_neither_grows_nor_keeps_a_peer_out(cluster: Cluster) -> None:
    nodes = NODES[:2]
    agent = cluster.start("n0", nodes)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(call(cluster)) for _ in range(3 * SPARE_CONNECTIONS)]
        for _ in range(4):
            agent.exchange(cluster.now)
        assert sum(not is_shut(stranger) for stranger in crowd) == SPARE_CONNECTIONS + len(nodes)
        cluster.start("n1", nodes)
        cluster.until(lambda: agent.view("n1").connected, moves_s=0.001)


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": "7"},
        {"generation": None},
        {"generation": True},
        {"generation": 1e300},
        {"store_port": -1},
        {"store_port": 1 << 16},
        {"store_port": [1]},
        {"phase": "asleep"},
        {"phase": ["running"]},
        {"reason": None},
        {"addr": 1},
        {"incarnation": {}},
        {"node": None},
    ],
)
def test_a_heartbeat_with_a_wrong_field_ends_the_connection(cluster: Cluster, changed: dict[str, object]) -> None:
    agent = cluster.start("n0")
    with call(cluster) as peer:
        wire = met(cluster, peer)
        wire.send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        before = agent.view("n1")
        wire.send(heartbeat("n1", **{"generation": 5, "reason": "wrong", **changed}), heartbeat("n1", generation=6))
        cluster.until(lambda: agent.view("n1").lost)
        assert agent.view("n1") == replace(before, connected=False, lost=True, last_seen=agent.view("n1").last_seen)
        assert is_shut(peer)


@pytest.mark.parametrize("line", [b"[" * 50_000, b"garbage", b"x" * 2_000_000, heartbeat("n2")])
def test_a_peer_that_sends_anything_else_is_lost(cluster: Cluster, line: bytes) -> None:
    agent = cluster.start("n0")
    with call(cluster) as peer:
        wire = met(cluster, peer)
        wire.send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        peer.setblocking(False)
        rest = memoryview(wire.sealed(line))

        def lost() -> bool:
            nonlocal rest
            with contextlib.suppress(BlockingIOError, ConnectionError):
                rest = rest[peer.send(rest) :] if rest else rest
            return agent.view("n1").lost

        cluster.until(lost)
        assert not agent.view("n1").connected
        assert not agent.view("n2").connected


def test_a_peer_that_stops_reading_holds_nobody_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, waits = LineChannel._ready, []

    def noted(channel: LineChannel, events: int, deadline: float | None) -> bool:
        waits.append(deadline is None or deadline > time.monotonic())
        return ready(channel, events, deadline)

    monkeypatch.setattr(LineChannel, "_ready", noted)
    nodes = NODES[:2]
    agent = cluster.start("n0", nodes)
    agent.says = agent.says.model_copy(update={"reason": "x" * REASON_CHARS})
    with call(cluster) as hung:
        met(cluster, hung).send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        turns = 0
        while not agent.view("n1").lost:
            waits.clear()
            agent.exchange(cluster.now, at_once=True)
            turns += 1
            assert not any(waits)
            assert turns < 50_000, "its buffers never fill"
    assert turns > 10
    assert waits, "the last message found no room"
    assert not agent.view("n1").connected


def test_a_closed_peer_is_lost_at_once_and_comes_back_at_another_address(cluster: Cluster) -> None:
    # n0 listens and n1 dials: each of them ends and comes back once.
    for gone, other in (("n0", "n1"), ("n1", "n0")):
        for node in NODES[:2]:
            if node not in cluster.agents:
                cluster.start(node, NODES[:2])
        cluster.all_meet()
        before = published_address(cluster.folder, gone)
        cluster.stop(gone)
        cluster.until(lambda other=other, gone=gone: cluster.agents[other].view(gone).lost, moves_s=0.001)
        assert not cluster.agents[other].view(gone).connected
        cluster.turn(moves_s=1.0)
        assert cluster.agents[other].view(gone).lost
        back = cluster.start(gone, NODES[:2], incarnation="second")
        assert published_address(cluster.folder, gone) != before
        cluster.all_meet()
        view = cluster.agents[other].view(gone)
        assert (view.incarnation, view.lost) == (f"{gone}-second", False)
        assert back.view(other).connected


def test_a_second_connection_of_a_peer_takes_the_place_of_the_first(cluster: Cluster) -> None:
    agent = cluster.start("n0")
    with call(cluster) as first, call(cluster) as second:
        met(cluster, first).send(heartbeat("n1"))
        cluster.until(lambda: agent.view("n1").connected)
        met(cluster, second).send(heartbeat("n1", incarnation="n1-again"))
        cluster.until(lambda: agent.view("n1").incarnation == "n1-again")
        assert is_shut(first)
        assert not is_shut(second)
        assert not agent.view("n1").lost


def test_a_watched_file_that_closes_does_not_stand_in_the_way_of_the_next(cluster: Cluster) -> None:
    agent = cluster.start("n0", NODES[:2])
    ours, theirs = socket.socketpair()
    agent.peers.watch(ours)
    number = ours.fileno()
    ours.close()
    again, their_end = socket.socketpair()
    assert number in (again.fileno(), their_end.fileno())
    for sock in (again, their_end):
        agent.peers.watch(sock)
    theirs.close()
    their_end.send(b"x")
    agent.peers.wait(NEVER_S)
    agent.peers.unwatch(ours)
    agent.peers.unwatch(ours)
    agent.peers.unwatch(again)
    agent.peers.wait(0.01)
    again.close()
    their_end.close()
