"""The agents' mesh: one TCP connection a pair, JSON lines, a heartbeat each quarter of a second.

An agent publishes its address in the run folder; of each pair, the later in node order dials. A closed connection is
noticed at once, silence by its length. Every connection starts with the run's key, which only the run's owner can read.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.agent.decide import PeerView, Phase
from hpctrain.base.atomic import write_text
from hpctrain.base.wire import LineChannel, Message

DIAL_EVERY_S = 0.2
CONNECT_TIMEOUT_S = 0.5
HEARTBEAT_S = 0.25


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


class Peers:
    """The other agents of the run."""

    def __init__(self, folder: Path, me: str, nodes: tuple[str, ...], addr: str, key: str) -> None:
        self._folder = folder
        self._me = me
        self._nodes = nodes
        self._key = key
        self._addr = addr
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._strangers: list[LineChannel] = []
        self._channels: dict[str, LineChannel] = {}
        self._views = {node: PeerView(node) for node in nodes if node != me}
        self._announced: dict[str, Announcement] = {}
        self._last_dial = float("-inf")
        self._last_beat = float("-inf")

    def open(self) -> None:
        """Listen, and publish the address in the run folder."""
        self._listener = socket.create_server((self._addr, 0))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._folder.mkdir(exist_ok=True)
        address = {"addr": self._addr, "port": self._listener.getsockname()[1]}
        write_text(self._folder / f"{self._me}.json", json.dumps(address) + "\n")

    def close(self) -> None:
        """Close every connection; the others notice at once."""
        for channel in [*self._channels.values(), *self._strangers]:
            channel.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def watch(self, file: Any) -> None:
        """Wake `wait` also when `file` (anything with a fileno) has something to read."""
        self._selector.register(file, selectors.EVENT_READ)

    def unwatch(self, file: Any) -> None:
        """Undo `watch`; call it before the file is closed."""
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def wait(self, seconds: float) -> None:
        """Return when something arrives, at the latest after that long."""
        self._selector.select(seconds)

    def views(self) -> tuple[PeerView, ...]:
        """The peers as last seen, in node order."""
        return tuple(self._views.values())

    def announcement(self, node: str) -> Announcement | None:
        """What a peer last said about itself."""
        return self._announced.get(node)

    def exchange(self, now: float, mine: Announcement, at_once: bool = False) -> None:
        """Take in what has arrived, dial who is missing, and send a heartbeat when one is due (or `at_once`)."""
        self._accept()
        self._greet(now)
        for node, channel in list(self._channels.items()):
            for message in channel.receive():
                self._take(now, node, message)
            if channel.closed:
                self._lose(node)
        if now - self._last_dial >= DIAL_EVERY_S:
            self._last_dial = now
            self._dial(now)
        if at_once or now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            for node, channel in list(self._channels.items()):
                if not channel.send({"type": "heartbeat", **mine.__dict__}):
                    self._lose(node)

    def _accept(self) -> None:
        assert self._listener is not None, "open comes first"
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            channel = self._prepare(connection)
            self._strangers.append(channel)
            self._selector.register(channel, selectors.EVENT_READ)

    def _greet(self, now: float) -> None:
        """Strangers become peers by the run's key; anybody else is shown the door."""
        for channel in list(self._strangers):
            messages = channel.receive()
            if not messages and not channel.closed:
                continue
            self._strangers.remove(channel)
            node = str(messages[0].get("node")) if messages else ""
            given = str(messages[0].get("key")) if messages else ""
            if node not in self._views or not hmac.compare_digest(given, self._key):
                self._drop(channel)
                continue
            self._join(now, node, channel)
            for message in messages[1:]:
                self._take(now, node, message)

    def _dial(self, now: float) -> None:
        for node in self._nodes[: self._nodes.index(self._me)]:
            if node in self._channels:
                continue
            try:
                address = json.loads((self._folder / f"{node}.json").read_text())
                connection = socket.create_connection((address["addr"], address["port"]), CONNECT_TIMEOUT_S)
            except (OSError, ValueError, KeyError):
                continue  # not there yet, or not any more: dialled again
            channel = self._prepare(connection)
            if channel.send({"type": "hello", "node": self._me, "key": self._key}):
                self._selector.register(channel, selectors.EVENT_READ)
                self._join(now, node, channel)

    def _prepare(self, connection: socket.socket) -> LineChannel:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Sends are a few hundred bytes: one that cannot be taken for this long means that the peer hangs.
        connection.settimeout(CONNECT_TIMEOUT_S)
        return LineChannel(connection)

    def _join(self, now: float, node: str, channel: LineChannel) -> None:
        if node in self._channels:
            self._drop(self._channels[node])
        self._channels[node] = channel
        self._views[node] = replace(self._views[node], last_seen=now, lost=False)

    def _take(self, now: float, node: str, message: Message) -> None:
        if message.get("type") != "heartbeat":
            return
        fields = {key: message[key] for key in Announcement.__dataclass_fields__}
        said = Announcement(**fields)
        self._announced[node] = said
        self._views[node] = PeerView(node, said.incarnation, True, False, now, said.generation, said.phase, said.reason)

    def _lose(self, node: str) -> None:
        channel = self._channels.pop(node)
        self._drop(channel)
        self._views[node] = replace(self._views[node], connected=False, lost=True)

    def _drop(self, channel: LineChannel) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is channel:
                self._selector.unregister(channel)
        channel.close()
