"""Dialling who is missing costs no time, gets rarer while nobody answers, and follows a change of address at once."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from direct_executor import HungExecutor
from loopback_agents import NODES, Cluster, RawPeer, heartbeat

from hpctrain.agent.peer_connector import CONNECT_TIMEOUT_S, publish_address, published_address


@contextlib.contextmanager
def deaf_port() -> Iterator[socket.socket]:
    """A listener on loopback that answers no request, as a node behind a cut cable: its queue of one is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        listener.setblocking(False)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        time.sleep(0.01)
        yield listener


def publish(cluster: Cluster, node: str, listener: socket.socket) -> None:
    cluster.folder.mkdir(exist_ok=True)
    publish_address(cluster.folder, node, listener.getsockname())


def accepted(listener: socket.socket) -> list[socket.socket]:
    """Whoever has connected to a listener that does not block."""
    connections = []
    with contextlib.suppress(BlockingIOError):
        while True:
            connections.append(listener.accept()[0])
    return connections


def callers(listener: socket.socket) -> set[tuple[str, int]]:
    """Addresses from which this process has called the listener so far, whether it answered or not."""
    calls = psutil.Process().net_connections("tcp")
    return {tuple(call.laddr) for call in calls if call.raddr and tuple(call.raddr) == listener.getsockname()}


def hung_up(listener: socket.socket) -> int:
    """How many had connected; they are closed."""
    connections = accepted(listener)
    for connection in connections:
        connection.close()
    return len(connections)


def test_nodes_that_cannot_be_reached_cost_no_time(cluster: Cluster) -> None:
    nodes = (*(f"away{n:02d}" for n in range(12)), "n0", "n1")
    with contextlib.ExitStack() as stack:
        for node in nodes[:12]:
            publish(cluster, node, stack.enter_context(deaf_port()))
        cluster.start("n0", nodes)
        cluster.start("n1", nodes)
        # 10 s of an agent's life: every one of them is dialled, given up and dialled again meanwhile. Waiting for one
        # connection would take minutes, and fail by the suite's own limit.
        for _ in range(100):
            cluster.turn(0.1)
        assert cluster.agents["n1"].view("n0").connected
        assert cluster.agents["n0"].view("n1").connected
        assert not any(cluster.agents["n0"].view(node).connected for node in nodes[:12])


def test_dialling_slows_down_until_the_address_changes(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.1", 0)) as new:
        busy.setblocking(False)
        new.setblocking(False)
        publish(cluster, "n0", busy)
        agent = cluster.start("n1", NODES[:2])
        calls: list[float] = []

        for _ in range(600):
            cluster.turn()
            # Somebody else listens there by now, and closes whatever comes.
            calls += [cluster.now] * hung_up(busy)
        pauses = [after - before for before, after in itertools.pairwise(calls)]
        assert pauses[0] < 0.5
        assert all(later >= earlier - 0.25 for earlier, later in itertools.pairwise(pauses))
        assert 4.9 < pauses[-1] < 5.4
        assert not agent.view("n0").lost

        publish(cluster, "n0", new)
        came: list[socket.socket] = []
        assert cluster.until(lambda: came.extend(accepted(new)) or came, moves_s=0.02) < 0.5
        came[0].close()


def test_a_node_that_had_answered_is_dialled_again_at_once(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        publish(cluster, "n0", server)
        agent = cluster.start("n1", NODES[:2])
        for _ in range(560):
            cluster.turn()
            hung_up(server)
        came: list[socket.socket] = []
        assert cluster.until(lambda: came.extend(accepted(server)) or came) > 1.0
        peer = RawPeer(came[0], "n0")
        peer.answer(cluster, "n0")
        peer.send(heartbeat("n0"))
        cluster.until(lambda: agent.view("n0").connected)
        came.pop().close()
        cluster.until(lambda: agent.view("n0").lost, moves_s=0.01)
        assert cluster.until(lambda: came.extend(accepted(server)) or came, moves_s=0.02) < 0.5
        came[0].close()


def test_an_attempt_that_takes_too_long_gives_way_to_a_new_one(cluster: Cluster) -> None:
    with deaf_port() as listener:
        publish(cluster, "n0", listener)
        cluster.start("n1", NODES[:2])
        cluster.turn()
        first = callers(listener)
        assert hung_up(listener) > 0
        cluster.turn(CONNECT_TIMEOUT_S + 0.1)
        came: list[socket.socket] = []
        # The kernel asks again, a second later, for attempts that nobody has given up.
        cluster.until(lambda: came.extend(accepted(listener)) or {sock.getpeername() for sock in came} - first)
        for sock in came:
            sock.close()


def test_a_change_of_address_ends_the_attempt_at_the_old_one(cluster: Cluster) -> None:
    with deaf_port() as listener:
        publish(cluster, "n0", listener)
        agent = cluster.start("n1", NODES[:2])
        for _ in range(5):
            cluster.turn()
        back = cluster.start("n0", NODES[:2])
        both = lambda: agent.view("n0").connected and back.view("n1").connected  # noqa: E731
        assert cluster.until(both, moves_s=0.01) < 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"addr": "127.0.0.1"}',
        '{"addr": "127.0.0.1", "port": 70000}',
        '{"addr": "127.0.0.1", "port": "80"}',
        '{"addr": "127.0.0.1", "port": 0}',
        '{"addr": "127.0.0.1", "port": Infinity}',
        '{"addr": "some.host", "port": 80}',
        '{"addr": null, "port": 80}',
    ],
)
def test_an_address_file_that_says_nothing_useful_is_looked_at_again(cluster: Cluster, text: str) -> None:
    cluster.folder.mkdir()
    (cluster.folder / "n0.json").write_text(text)
    assert published_address(cluster.folder, "n0") is None
    agent = cluster.start("n1", NODES[:2])
    agent.exchange(cluster.now)
    cluster.start("n0", NODES[:2])
    cluster.until(lambda: agent.view("n0").connected)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "[" * 100_000, '{"addr": "127.0.0.1"}', '{"addr": "node0", "port": 1}',
        '{"addr": ["127.0.0.1"], "port": 1}', '{"addr": "127.0.0.1", "port": 65536}',
        '{"addr": "127.0.0.1", "port": true}',
        '{"addr": "127.0.0.1", "port": 1e3}', '{"addr": "fe80::1%no-such-interface", "port": 9}',
        '{"addr": "255.255.255.255", "port": 9}', '{"addr": "::", "port": 9}',
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_passed_over_until_there_is_one(cluster: Cluster, text: str) -> None:
    cluster.folder.mkdir()
    (cluster.folder / "n0.json").write_text(text)
    agent = cluster.start("n1", NODES[:2])
    for _ in range(4):
        cluster.turn(0.3)
    assert not agent.view("n0").connected
    cluster.start("n0", NODES[:2])
    cluster.all_meet()


def test_addresses_that_cannot_be_read_hold_nobody_up(cluster: Cluster) -> None:
    """Their files hang: agents that know an address use it, and the others go on without."""
    hung = HungExecutor()
    cluster.start("n0")
    cluster.start("n1")
    cluster.until(lambda: cluster.agents["n0"].view("n1").connected)
    cluster.files = hung
    agent = cluster.start("n2")
    for _ in range(40):
        cluster.turn(0.1)
        time.sleep(0.001)
    assert cluster.now - cluster.agents["n0"].view("n1").last_seen < 1.0
    assert not agent.view("n0").connected
    hung.let_go()
    cluster.until(lambda: hung.let_go() or agent.view("n0").connected)
