"""How the coordinating node reaches the others: a star of connections, or a simulated one behind the same calls."""

from __future__ import annotations

import selectors
from collections.abc import Iterable, Iterator
from typing import Protocol

from hpctrain.base.wire import LineChannel, Message
from hpctrain.probe.door import Door


class Transport(Protocol):
    """Messages between the coordinator and the nodes."""

    def admit(self, expected: set[str], deadline: float) -> Message | None:
        """The hello of the next node out of `expected` that joins; None when there was none before `deadline`."""

    def send(self, node: str, message: Message) -> None:
        """Send one message to a node; one that is gone shows in `receive`."""

    def receive(self, seconds: float) -> Iterable[tuple[str, Message | None]]:
        """Wait up to that time for something, and return what there is; None instead of a message: the node is gone."""

    def close(self) -> None:
        """Close every connection."""


class Star:
    """A TCP connection to each node that came through the door."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._channels: dict[str, LineChannel] = {}
        self._selector = selectors.DefaultSelector()

    def admit(self, expected: set[str], deadline: float) -> Message | None:
        """See Transport."""

        def is_missing(hello: Message) -> bool:
            return hello.get("kind") == "join" and hello.get("node") in expected

        admitted = self._door.admit(is_missing, deadline)
        if admitted is None:
            return None
        channel, hello = admitted
        self._channels[str(hello["node"])] = channel
        self._selector.register(channel, selectors.EVENT_READ, str(hello["node"]))
        return hello

    def send(self, node: str, message: Message) -> None:
        """See Transport."""
        self._channels[node].send(message)

    def receive(self, seconds: float) -> Iterator[tuple[str, Message | None]]:
        """See Transport."""
        for key, _ in self._selector.select(seconds):
            name = str(key.data)
            channel = self._channels[name]
            for message in channel.receive():
                yield name, message
            if channel.closed:
                self._selector.unregister(channel)
                yield name, None

    def close(self) -> None:
        """See Transport."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._selector.close()
