"""Connections between the coordinator and the nodes of a probe, real or simulated."""

from __future__ import annotations

import selectors
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hpctrain.base.net.wire import LineChannel, MalformedMessage, Message
from hpctrain.probe.protocol.messages import Answer, Join, read_answer, read_join
from hpctrain.probe.protocol.peer_connection import ProbeListener


@dataclass(frozen=True)
class ConnectionLost:
    """The connection to a node is closed."""

    why: str = "its process ended"


class Transport(Protocol):
    """Carries messages between the coordinator and the nodes."""

    def admit(self, expected: set[str], deadline: float) -> Join | None:
        """Return the join message of the next node out of `expected`; None when none joined before `deadline`."""

    def send(self, node: str, message: Message) -> None:
        """Send one message to a node. A lost connection shows in `receive`."""

    def receive(self, seconds: float) -> Iterable[tuple[str, Answer | ConnectionLost]]:
        """Wait up to `seconds` for answers, and return (node, answer) for each one that arrived."""

    def close(self) -> None:
        """Close every connection."""


class StarTransport:
    """A TCP connection to each node that the listener admitted."""

    def __init__(self, listener: ProbeListener) -> None:
        self._listener = listener
        self._channels: dict[str, LineChannel] = {}
        self._selector = selectors.DefaultSelector()

    def admit(self, expected: set[str], deadline: float) -> Join | None:
        """Return the join message of the next node out of `expected`; None when none joined before `deadline`."""

        def is_missing(claims: Message) -> bool:
            try:
                return read_join(claims).node in expected
            except MalformedMessage as error:
                print(f"hpctrain probe: a node that knows the token was turned away: {error}", flush=True)
                return False

        admitted = self._listener.admit(is_missing, deadline)
        if admitted is None:
            return None
        channel, join = admitted[0], read_join(admitted[1])
        self._channels[join.node] = channel
        self._selector.register(channel, selectors.EVENT_READ, join.node)
        return join

    def send(self, node: str, message: Message) -> None:
        """Send one message to a node. A lost connection shows in `receive`."""
        self._channels[node].send(message)

    def receive(self, seconds: float) -> Iterator[tuple[str, Answer | ConnectionLost]]:
        """Wait up to `seconds` for answers, and return (node, answer) for each one that arrived."""
        for key, _ in self._selector.select(seconds):
            name = str(key.data)
            channel = self._channels[name]
            for message in channel.receive():
                try:
                    answer = read_answer(message)
                except MalformedMessage as error:
                    channel.refuse(str(error))
                    break
                yield name, answer
            if channel.closed:
                self._selector.unregister(channel)
                yield name, ConnectionLost(channel.fault) if channel.fault else ConnectionLost()

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._selector.close()
