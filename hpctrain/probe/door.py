"""How probing nodes find and trust each other: a listening socket that admits only who knows the probe's token."""

from __future__ import annotations

import hmac
import selectors
import socket
from collections.abc import Callable

from hpctrain.base.clock import Clock
from hpctrain.base.wire import LineChannel, Message

HELLO_S = 5.0
"""A connection that has not said hello after this time is closed."""


class Broken(Exception):  # noqa: N818 - the state of a connection, handled inside the room
    """A connection to a peer failed; the text says how, for the report."""


class Door:
    """A listening socket on this node's address. Strangers are closed without an answer and hold up nobody."""

    def __init__(self, listener: socket.socket, token: str, clock: Clock) -> None:
        self._listener = listener
        self._token = token
        self._clock = clock
        self._pending: list[tuple[float, LineChannel]] = []

    @property
    def port(self) -> int:
        """The port that peers connect to."""
        number: int = self._listener.getsockname()[1]
        return number

    def admit(self, wanted: Callable[[Message], bool], deadline: float) -> tuple[LineChannel, Message] | None:
        """The next connection with the token whose hello is wanted; None when there was none before `deadline`."""
        while (left := deadline - self._clock.now()) > 0:
            self._wait(min(left, HELLO_S))
            for since, channel in list(self._pending):
                hello = next(iter(channel.receive()), None)
                if hello is None and not channel.closed and self._clock.now() - since < HELLO_S:
                    continue
                self._pending.remove((since, channel))
                if hello is not None and self._trusted(hello) and wanted(hello) and channel.send({"kind": "welcome"}):
                    return channel, hello
                channel.close()
        return None

    def close(self) -> None:
        """Close the socket and whatever still waits before it."""
        self._listener.close()
        for _, channel in self._pending:
            channel.close()
        self._pending.clear()

    def _wait(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for _, channel in self._pending:
                selector.register(channel, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it went away between the two calls
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending.append((self._clock.now(), LineChannel(sock)))

    def _trusted(self, hello: Message) -> bool:
        return hmac.compare_digest(str(hello.get("token", "")).encode(errors="surrogatepass"), self._token.encode())


def open_door(addr: str, token: str, clock: Clock) -> Door:
    """Listen on this address alone, on a port that the system chooses.

    Raises:
        OSError: the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    listener = socket.create_server((addr, 0), family=family, backlog=1024)
    listener.setblocking(False)
    return Door(listener, token, clock)


def knock(addr: str, port: int, hello: Message, timeout_s: float) -> LineChannel:
    """Connect to a door, say hello (with the token in it) and wait to be welcomed.

    Raises:
        Broken: unreachable, refused or silent.
    """
    try:
        sock = socket.create_connection((addr, port), timeout=max(timeout_s, 0.001))
    except OSError as error:
        raise Broken(f"cannot connect to {addr}:{port}: {error.strerror or error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = LineChannel(sock)
    channel.send(hello)
    answer = None if channel.closed else channel.wait_message(max(timeout_s, 0.001))
    if answer is None or answer.get("kind") != "welcome":
        closed = channel.closed
        channel.close()
        raise Broken(f"{addr}:{port} closed the connection" if closed else f"{addr}:{port} does not answer")
    return channel
