"""The agents' mesh: one TCP connection a pair, JSON lines, a heartbeat each quarter of a second.

An agent publishes its address in the run folder; of each pair, the later in node order dials. A closed connection is
noticed at once, silence by its length. Every connection starts with a mutual proof that both sides know the run's key,
which only the run's owner can read, and every line after it is sealed (`base.handshake`).
Nothing here waits: neither for a node that hangs, nor for one that cannot be reached, nor for whoever finds the port.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

from hpctrain.agent.decide import PeerView, Phase
from hpctrain.agent.dialler import Dialler, listen, publish_address
from hpctrain.agent.stall import WorkerDoing, from_message, to_message
from hpctrain.agent.watch import Watch, Watchable
from hpctrain.base.handshake import LONGEST_BYTES, Answerer, Caller, Session
from hpctrain.base.wire import LINE_LIMIT, LineChannel, Message

HEARTBEAT_S = 0.25
HELLO_S = 2.0
"""Who has not proved itself by then is shown the door."""
HELLO_BYTES = 16384
"""The longest line taken from a node that was called: its first heartbeat may come right behind its proof."""
CALL_S = 5.0
"""A node that was called and does not prove itself by then is called again: it may hang, and its kernel answers."""
REASON_CHARS = 1000
SPARE_SEATS = 64
"""Strangers that may wait at a time, besides one for each node."""
BACKLOG = 1024
GIVE_UP_MS = 60_000
"""The kernel closes a connection over which nothing got through for this long: the node may be back elsewhere."""


@dataclass(frozen=True)
class Announcement:
    """What an agent tells the others about itself with each heartbeat."""

    node: str
    incarnation: str
    addr: str
    store_port: int
    generation: int
    phase: Phase
    reason: str
    doing: tuple[WorkerDoing, ...] = ()
    unheard: tuple[int, ...] = ()
    """Places in node order of the nodes that it does not hear."""


@dataclass(frozen=True)
class _Stranger:
    """Somebody who connected and has proved nothing yet."""

    since: float
    channel: LineChannel
    proof: Answerer


@dataclass(frozen=True)
class _Called:
    """A node that this one connected to and that has proved nothing yet."""

    since: float
    channel: LineChannel
    proof: Caller


class Peers:
    """The other agents of the run."""

    def __init__(self, folder: Path, me: str, nodes: tuple[str, ...], addr: str, key: str) -> None:
        self._folder = folder
        self._me = me
        self._nodes = nodes
        self._key = key.encode()
        self._addr = addr
        self._listener: socket.socket | None = None
        self._watch = Watch()
        self._dialler = Dialler(folder, self._watch)
        self._strangers: list[_Stranger] = []
        self._called: dict[str, _Called] = {}
        self._channels: dict[str, LineChannel] = {}
        self._views = {node: PeerView(node) for node in nodes if node != me}
        self._announced: dict[str, Announcement] = {}
        self._fresh: set[str] = set()
        self._last_beat = float("-inf")

    def open(self) -> None:
        """Listen, and publish the address in the run folder."""
        self._listener = listen(self._addr, BACKLOG)
        self._watch.add(self._listener)
        self._folder.mkdir(exist_ok=True)
        publish_address(self._folder, self._me, self._listener)

    def close(self) -> None:
        """Close every connection; the others notice at once."""
        strangers = [stranger.channel for stranger in self._strangers]
        called = [called.channel for called in self._called.values()]
        for channel in [*self._channels.values(), *strangers, *called]:
            channel.close()
        self._dialler.close()
        if self._listener is not None:
            self._listener.close()
        self._watch.close()

    def watch(self, file: Watchable) -> None:
        """Wake `wait` also when `file` (anything with a fileno) has something to read."""
        self._watch.add(file)

    def unwatch(self, file: Watchable) -> None:
        """Undo `watch`."""
        self._watch.remove(file)

    def wait(self, seconds: float) -> None:
        """Return when something arrives, at the latest after that long."""
        self._watch.wait(seconds)

    def views(self) -> tuple[PeerView, ...]:
        """The peers as last seen, in node order."""
        return tuple(self._views.values())

    def announcement(self, node: str) -> Announcement | None:
        """What a peer last said about itself."""
        return self._announced.get(node)

    def exchange(self, now: float, mine: Announcement, at_once: bool = False) -> None:
        """Take in what has arrived, dial who is missing, and send a heartbeat when one is due (or `at_once`)."""
        self._greet(now)
        self._accept(now)
        self._greet(now)
        self._prove(now)
        for node, channel in list(self._channels.items()):
            self._hear(now, node, channel)
        self._dial(now)
        self._beat(now, mine, at_once)

    def _accept(self, now: float) -> None:
        assert self._listener is not None, "open comes first"
        seats = len(self._nodes) + SPARE_SEATS
        for _ in range(SPARE_SEATS):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # nobody is there, or not any more
            if len(self._strangers) >= seats:
                # A node says hello as soon as it is connected: who has waited longest is none.
                self._drop(self._strangers.pop(0).channel)
            stranger = _Stranger(now, _channel(connection, LONGEST_BYTES), Answerer(self._key, {"node": self._me}))
            # A send that fails closes the channel, which is seen when it is listened to.
            stranger.channel.send(stranger.proof.challenge())
            self._strangers.append(stranger)
            self._watch.add(stranger.channel)

    def _greet(self, now: float) -> None:
        """Strangers become peers by proving that they know the run's key; anybody else is shown the door."""
        waiting = []
        for stranger in self._strangers:
            channel = stranger.channel
            hello = channel.wait_message(0)
            if hello is None and not channel.closed and now - stranger.since < HELLO_S:
                waiting.append(stranger)
                continue
            taken = None if hello is None else stranger.proof.take_hello(hello)
            node = None if taken is None else self._caller(taken[1].claims)
            if taken is not None and node is not None and channel.send(taken[0]):
                self._join(node, channel, taken[1])
            else:
                self._drop(channel)
        self._strangers = waiting

    def _caller(self, claims: Message) -> str | None:
        """The node that says it calls; None when it is none of this run, or meant somebody else: whoever took the port
        of a dead agent could lead a call for that one here, to have it put in the place of a living connection."""
        node = claims.get("node")
        return node if isinstance(node, str) and node in self._views and claims.get("to") == self._me else None

    def _dial(self, now: float) -> None:
        before = self._nodes[: self._nodes.index(self._me)]
        missing = [node for node in before if node not in self._channels and node not in self._called]
        for node, connection in self._dialler.dial(now, missing):
            proof = Caller(self._key, {"node": self._me, "to": node})
            self._called[node] = _Called(now, _channel(connection, HELLO_BYTES), proof)
            self._watch.add(self._called[node].channel)

    def _prove(self, now: float) -> None:
        """Go on with the nodes that were called: they prove themselves too, and that they are the ones meant."""
        for node, called in list(self._called.items()):
            message = called.channel.wait_message(0)
            if message is None and not called.channel.closed and now - called.since < CALL_S:
                continue
            hello = None if message is None else called.proof.take_challenge(message)
            if hello is not None and called.channel.send(hello):
                continue
            del self._called[node]
            session = None if message is None else called.proof.take_welcome(message)
            if session is not None and session.claims.get("node") == node:
                self._join(node, called.channel, session)
            else:
                self._drop(called.channel)

    def _join(self, node: str, channel: LineChannel, session: Session) -> None:
        # The view stays as it is: a heartbeat says more.
        channel.seal(session.send_key, session.receive_key)
        channel.line_limit = LINE_LIMIT
        if node in self._channels:
            self._drop(self._channels[node])
        self._channels[node] = channel
        self._fresh.add(node)

    def _hear(self, now: float, node: str, channel: LineChannel) -> None:
        for message in channel.receive():
            said = announced(message)
            if said is None:
                continue
            if said.node != node:
                # It proved to be another node than it now says.
                channel.close()
                break
            self._dialler.heard(node)
            self._announced[node] = said
            self._views[node] = PeerView(
                node, said.incarnation, True, False, now, said.generation, said.phase, said.reason, said.doing,
                said.unheard,
            )  # fmt: skip
        if channel.closed:
            self._lose(node)

    def _beat(self, now: float, mine: Announcement, at_once: bool) -> None:
        """Tell everybody when it is time, else those who have just come."""
        due = at_once or now - self._last_beat >= HEARTBEAT_S
        if due:
            self._last_beat = now
        heartbeat = {"type": "heartbeat", **mine.__dict__, "reason": mine.reason[:REASON_CHARS]}
        heartbeat["doing"] = to_message(mine.doing)
        for node, channel in list(self._channels.items()):
            if (due or node in self._fresh) and not channel.send(heartbeat):
                self._lose(node)
        self._fresh.clear()

    def _lose(self, node: str) -> None:
        self._drop(self._channels.pop(node))
        view = self._views[node]
        # A connection that closes before its first heartbeat was none: nothing is lost by it.
        self._views[node] = replace(view, connected=False, lost=view.lost or view.connected)

    def _drop(self, channel: LineChannel) -> None:
        self._watch.remove(channel)
        channel.close()


def announced(message: Message) -> Announcement | None:
    """The announcement in a heartbeat; None when it is no heartbeat, or not one as this program sends it."""
    names = [field.name for field in fields(Announcement)]
    if message.get("type") != "heartbeat" or not all(name in message for name in names):
        return None
    doing, unheard = from_message(message["doing"]), message["unheard"]
    if doing is None or not isinstance(unheard, list) or not all(type(at) is int and at >= 0 for at in unheard):
        return None
    said = Announcement(**{**{name: message[name] for name in names}, "doing": doing, "unheard": tuple(unheard)})
    texts = (said.node, said.incarnation, said.addr, said.reason)
    numbers = (said.store_port, said.generation)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        return None
    return said if said.phase in get_args(Phase) and 0 <= said.store_port < 1 << 16 else None


def _channel(connection: socket.socket, line_limit: int) -> LineChannel:
    """A connection between agents. Its buffers hold minutes of heartbeats: when they are full, the peer hangs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP_MS)
    return LineChannel(connection, send_timeout_s=0.0, line_limit=line_limit, strict=True)
