"""How probing nodes find and trust each other: a listening socket that admits only who proves to know its token.

The token itself never crosses the network (`base.handshake`).
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.base.clock import Clock
from hpctrain.base.handshake import LONGEST_BYTES, Answerer, Caller, Session
from hpctrain.base.wire import LINE_LIMIT, LineChannel, Message

HELLO_S = 5.0
"""A connection that has not proved itself after this time is closed."""
MOST_WAITING = 1024
"""Strangers before the door at a time; one more takes the place of whoever has waited longest."""


class Broken(Exception):  # noqa: N818 - the state of a connection, handled inside the room
    """A connection to a peer failed; the text says how, for the report."""


@dataclass(frozen=True)
class _Stranger:
    """Somebody who connected and has proved nothing yet."""

    since: float
    channel: LineChannel
    proof: Answerer


class Door:
    """A listening socket on this node's address. Strangers are closed without an answer and hold up nobody."""

    def __init__(self, listener: socket.socket, token: str, clock: Clock) -> None:
        self._listener = listener
        self._token = token.encode()
        self._clock = clock
        self._pending: list[_Stranger] = []

    @property
    def port(self) -> int:
        """The port that peers connect to."""
        number: int = self._listener.getsockname()[1]
        return number

    def admit(self, wanted: Callable[[Message], bool], deadline: float) -> tuple[LineChannel, Message] | None:
        """The next connection with the token whose claims are wanted; None when there was none before `deadline`."""
        while (left := deadline - self._clock.now()) > 0:
            self._wait(min(left, HELLO_S))
            for stranger in list(self._pending):
                channel = stranger.channel
                hello = channel.wait_message(0)
                if hello is None and not channel.closed and self._clock.now() - stranger.since < HELLO_S:
                    continue
                self._pending.remove(stranger)
                taken = None if hello is None else stranger.proof.take_hello(hello)
                if taken is not None and wanted(taken[1].claims) and channel.send(taken[0]):
                    _trust(channel, taken[1])
                    return channel, taken[1].claims
                channel.close()
        return None

    def close(self) -> None:
        """Close the socket and whatever still waits before it."""
        self._listener.close()
        for stranger in self._pending:
            stranger.channel.close()
        self._pending.clear()

    def _wait(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for stranger in self._pending:
                selector.register(stranger.channel, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it went away between the two calls
        if len(self._pending) >= MOST_WAITING:
            self._pending.pop(0).channel.close()
        stranger = _Stranger(self._clock.now(), _channel(sock), Answerer(self._token, {}))
        if stranger.channel.send(stranger.proof.challenge()):
            self._pending.append(stranger)


def open_door(addr: str, token: str, clock: Clock) -> Door:
    """Listen on this address alone, on a port that the system chooses.

    Raises:
        OSError: the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    listener = socket.create_server((addr, 0), family=family, backlog=1024)
    listener.setblocking(False)
    return Door(listener, token, clock)


def knock(addr: str, port: int, token: str, claims: Message, timeout_s: float, clock: Clock) -> LineChannel:
    """Connect to a door, prove to know the token, and have the other side prove it too.

    Args:
        claims: what to say about this side.

    Raises:
        Broken: unreachable, refused, silent, or without the token itself.
    """
    deadline = clock.now() + max(timeout_s, 0.001)
    try:
        sock = socket.create_connection((addr, port), timeout=max(timeout_s, 0.001))
    except OSError as error:
        raise Broken(f"cannot connect to {addr}:{port}: {error.strerror or error}") from error
    channel, proof = _channel(sock), Caller(token.encode(), claims)
    challenge = channel.wait_message(max(0.0, deadline - clock.now()))
    hello = None if challenge is None else proof.take_challenge(challenge)
    welcome = None
    if hello is not None and channel.send(hello):
        welcome = channel.wait_message(max(0.0, deadline - clock.now()))
    session = None if welcome is None else proof.take_welcome(welcome)
    if session is None:
        stranger = (challenge is not None and hello is None) or welcome is not None
        how = (
            "does not know the token" if stranger else "closed the connection" if channel.closed else "does not answer"
        )
        channel.close()
        raise Broken(f"{addr}:{port} {how}")
    _trust(channel, session)
    return channel


def _channel(sock: socket.socket) -> LineChannel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return LineChannel(sock, line_limit=LONGEST_BYTES, strict=True)


def _trust(channel: LineChannel, session: Session) -> None:
    channel.seal(session.send_key, session.receive_key)
    channel.line_limit, channel.strict = LINE_LIMIT, False
