"""Authenticated connections between the nodes of a probe: a listener admits only peers that know the token, a random
secret of one probe.

The token itself is never sent over the network (`hpctrain.base.net.authentication`).
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hpctrain.base.clock import Clock
from hpctrain.base.net.authentication import MAX_LINE_BYTES, AuthListener, HandshakeClient, HandshakeServer
from hpctrain.base.net.wire import LINE_LIMIT, LineChannel, MalformedMessage, Message, Watch
from hpctrain.probe.protocol.messages import Answer, Join, read_answer, read_join

HANDSHAKE_S = 5.0
"""Seconds after which a connection that is not authenticated is closed."""


class PeerError(Exception):
    """A connection to another node of the probe failed; the text says why."""


class ProbeListener:
    """A socket of a probe that listens on an address of this node. A caller that does not know the probe's
    token is disconnected, and delays no other caller."""

    def __init__(self, addr: str, token: str, clock: Clock, peers: int = 1) -> None:
        """Listen on address `addr` only, on a port that the system chooses.

        Args:
            token: the secret that callers have to know.
            peers: number of peers that may connect at a time.

        Raises:
            OSError: the address is not one of this machine.
        """
        self.token = token
        self._clock = clock
        self._watch = Watch()
        key = token.encode()
        self._listener = AuthListener(addr, self._watch, lambda: HandshakeServer(key, {}), _channel, peers, HANDSHAKE_S)

    @property
    def port(self) -> int:
        """The port that peers connect to."""
        return self._listener.address[1]

    def admit(self, wanted: Callable[[Message], bool], deadline: float) -> tuple[LineChannel, Message] | None:
        """Return the next authenticated connection, and its claims: what the peer reports about itself. None when there
        is none before `deadline`, in seconds of the listener's clock.

        Args:
            wanted: returns whether to admit a peer with these claims; other peers are refused.
        """
        while (remaining_s := deadline - self._clock.now()) > 0:
            self._watch.wait(min(remaining_s, HANDSHAKE_S))
            self._listener.accept(self._clock.now())
            admitted = self._listener.admit(self._clock.now(), wanted)
            if admitted is not None:
                channel, session = admitted
                self._watch.remove(channel)
                return channel, session.claims
        return None

    def close(self) -> None:
        """Close the socket, and all connections that were not admitted yet."""
        self._listener.close()
        self._watch.close()


def connect(addr: str, port: int, token: str, claims: Message, timeout_s: float, clock: Clock) -> LineChannel:
    """Return a new connection to a listener, after both sides have proved that they know the token.

    Args:
        claims: what this side reports about itself.
        timeout_s: seconds for the connection and the proofs together.

    Raises:
        PeerError: the peer is unreachable, refuses, is silent, or does not know the token.
    """
    deadline = clock.now() + max(timeout_s, 0.001)
    try:
        channel = _channel(socket.create_connection((addr, port), timeout=max(timeout_s, 0.001)))
    except OSError as error:
        raise PeerError(f"cannot connect to {addr}:{port}: {error.strerror or error}") from error
    proof = HandshakeClient(token.encode(), claims)
    challenge = channel.wait_message(max(0.0, deadline - clock.now()))
    hello = None if challenge is None else proof.answer_challenge(challenge)
    welcome = None
    if hello is not None and channel.send(hello):
        welcome = channel.wait_message(max(0.0, deadline - clock.now()))
    session = None if welcome is None else proof.verify_welcome(welcome)
    if session is None:
        stranger = (challenge is not None and hello is None) or welcome is not None or bool(channel.fault)
        how = (
            "does not know the token" if stranger else "closed the connection" if channel.closed else "does not answer"
        )
        channel.close()
        raise PeerError(f"{addr}:{port} {how}")
    channel.seal(session.send_key, session.receive_key)
    channel.line_limit = LINE_LIMIT
    return channel


def _channel(sock: socket.socket) -> LineChannel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return LineChannel(sock, line_limit=MAX_LINE_BYTES, strict=True)


@dataclass(frozen=True)
class ConnectionLost:
    """What `Transport.receive` returns for a node when the connection to the node is closed; `why` is the reason."""

    why: str = "its process ended"


class Transport(Protocol):
    """The coordinator's way to send messages to the nodes and to receive their answers. `StarTransport` does it over
    TCP; tests use a fake."""

    def admit(self, expected: set[str], deadline: float) -> Join | None:
        """Return the join message of the next node whose name is in `expected`; None when none joined before
        `deadline`, in seconds of the probe's clock."""

    def send(self, node: str, message: Message) -> None:
        """Send one message to a node. A lost connection raises no error here; `receive` reports it."""

    def receive(self, seconds: float) -> Iterable[tuple[str, Answer | ConnectionLost]]:
        """Wait up to `seconds` for answers. Return (node, answer) for each answer that arrived, and (node,
        ConnectionLost) for each connection that closed."""

    def close(self) -> None:
        """Close every connection."""


class StarTransport:
    """A `Transport` with one TCP connection from the coordinator to each node, admitted by the coordinator's
    listener."""

    def __init__(self, listener: ProbeListener) -> None:
        self._listener = listener
        self._channels: dict[str, LineChannel] = {}
        self._selector = selectors.DefaultSelector()

    def admit(self, expected: set[str], deadline: float) -> Join | None:
        """Return the join message of the next node whose name is in `expected`; None when none joined before
        `deadline`, in seconds of the probe's clock."""

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
        """Send one message to a node. A lost connection raises no error here; `receive` reports it."""
        self._channels[node].send(message)

    def receive(self, seconds: float) -> Iterator[tuple[str, Answer | ConnectionLost]]:
        """Wait up to `seconds` for answers. Yield (node, answer) for each answer that arrived, and (node,
        ConnectionLost) for each connection that closed."""
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
