"""Agents reduced to their peers, on loopback, with one clock that the test moves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from direct_executor import DirectExecutor

from hpctrain.agent.peer_messages import Announcement
from hpctrain.agent.peers import PeerMesh
from hpctrain.agent.tree.routing import TreeRouting
from hpctrain.agent.view import PeerView
from hpctrain.base.net.authentication import HandshakeClient, HandshakeServer
from hpctrain.base.net.wire import LineChannel, LineMac, Message

KEY = "the run's key"
NODES = ("n0", "n1", "n2")
TIMEOUT_S = 2.0
"""Seconds of silence after which a neighbour in a tree counts as lost."""


@dataclass
class Agent:
    """An agent reduced to its peers and what it announces."""

    peers: PeerMesh
    says: Announcement

    def exchange(self, now: float, at_once: bool = False) -> None:
        """One exchange."""
        self.peers.exchange(now, self.says, at_once)

    def view(self, node: str) -> PeerView:
        return next(view for view in self.peers.views() if view.node == node)


class Cluster:
    """Agents on loopback with one clock, which the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.agents: dict[str, Agent] = {}
        self.files: Executor = DirectExecutor()
        """Reads the addresses of the agents that are started next."""

    def start(
        self,
        node: str,
        nodes: tuple[str, ...] = NODES,
        key: str = KEY,
        incarnation: str = "first",
        fan_out: int | None = None,
    ) -> Agent:
        """Start an agent; with a fan-out, in a tree."""
        tree = None if fan_out is None else TreeRouting(node, nodes, TIMEOUT_S, fan_out)
        peers = PeerMesh(self.folder, node, nodes, "127.0.0.1", key, self.files, tree)
        peers.open()
        says = Announcement(
            node=node, incarnation=f"{node}-{incarnation}", addr="127.0.0.1", store_port=4000, generation=0,
            phase="joining", reason="start",
        )  # fmt: skip
        self.agents[node] = Agent(peers, says)
        return self.agents[node]

    def cut(self, a: str, b: str) -> None:
        """Nothing that these two send each other arrives any more, until they are healed."""
        for me, other in ((a, b), (b, a)):
            peers = self.agents[me].peers
            hear = peers._receive
            peers._receive = (  # type: ignore[method-assign]
                lambda now, node, channel, hear=hear, other=other: (
                    channel.receive() and None if node == other else hear(now, node, channel)
                )
            )

    def heal(self) -> None:
        """End every cut."""
        for agent in self.agents.values():
            agent.peers.__dict__.pop("_receive", None)

    def stop(self, node: str) -> None:
        self.agents.pop(node).peers.close()

    def until(self, condition: Callable[[], object], moves_s: float = 0.05, within_s: float = 60.0) -> float:
        """Exchange in turns until it holds; fails after `within_s` of real time. How far the clock moved comes back."""
        begin, deadline = self.now, time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it never came about"
            self.turn(moves_s)
            time.sleep(0.001)
        return self.now - begin

    def turn(self, moves_s: float = 0.05) -> None:
        """One exchange of each."""
        self.now += moves_s
        for agent in self.agents.values():
            agent.exchange(self.now)

    def all_meet(self) -> None:
        self.until(lambda: all(view.connected for agent in self.agents.values() for view in agent.peers.views()))

    def close(self) -> None:
        for node in list(self.agents):
            self.stop(node)


class RawPeer:
    """The test's own end of a connection to an agent: proved like a peer, it then sends whatever bytes it likes."""

    def __init__(self, sock: socket.socket, node: str) -> None:
        self.sock = sock
        self._proof = HandshakeClient(KEY.encode(), {"node": node, "to": "n0"})
        self._seal: LineMac | None = None

    def meet(self, cluster: Cluster) -> None:
        """Prove to know the key to an agent that was called; the cluster takes its turns meanwhile."""
        channel = LineChannel(self.sock)
        hello = self._proof.answer_challenge(self._next(cluster, channel))
        assert hello is not None
        channel.send(hello)
        session = self._proof.verify_welcome(self._next(cluster, channel))
        assert session is not None
        self._seal = LineMac(session.send_key)

    def answer(self, cluster: Cluster, node: str) -> None:
        """Prove to know the key to an agent that called."""
        channel, proof = LineChannel(self.sock), HandshakeServer(KEY.encode(), {"node": node})
        channel.send(proof.challenge())
        taken = proof.answer_hello(self._next(cluster, channel))
        assert taken is not None
        channel.send(taken[0])
        self._seal = LineMac(taken[1].send_key)

    def send(self, *lines: bytes) -> None:
        """Send lines, each with its MAC."""
        for line in lines:
            self.sock.sendall(self.sealed(line))

    def sealed(self, line: bytes) -> bytes:
        """A line with its MAC and its end."""
        assert self._seal is not None, "meet or answer comes first"
        return self._seal.mac(line) + b" " + line + b"\n"

    def _next(self, cluster: Cluster, channel: LineChannel) -> Message:
        got: list[Message] = []

        def came() -> bool:
            message = channel.wait_message(0)
            got.extend([message] if message is not None else [])
            return bool(got) or channel.closed

        cluster.until(came, moves_s=0.001)
        assert got, "the agent hung up"
        return got[0]


def heartbeat(sender: str, **changed: object) -> bytes:
    said = Announcement(
        node=sender, incarnation=f"{sender}-raw", addr="127.0.0.1", store_port=1, generation=0, phase="running",
        reason="",
    )  # fmt: skip
    return json.dumps({**said.to_json(), **changed}).encode()
