"""A mutual proof of two processes that they know a run's key, and a listening socket that admits only callers with this
proof.

The key itself never crosses the network. The handshake has three lines: the server sends a challenge, the client
answers it and sends its own challenge, and the server answers that one. A proof is HMAC-SHA256 (RFC 2104) under the
key, over the role (client or server), both nonces and the claims of each side. The role prevents reflection of a proof,
the nonces prevent replay. A caller without the key sees only a nonce. After the handshake, every line carries a MAC
under keys made of both nonces (`LineChannel.seal`). The classes of the handshake take and return messages, and open no
socket.

Agents and the probe listen with an AuthListener. It limits the number of callers that have not authenticated, and their
time. When the number is reached, a new caller replaces the oldest one of the address with the most pending callers, so
a flood from one node does not shut out the others. When the process has no descriptor left, the listener accepts
callers with a spare descriptor and closes them: as long as they waited in the kernel's queue, every wait for the socket
would return at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.base.net.wire import LINE_LIMIT, LineChannel, Message, Watch

NONCE_BYTES = 16
MAX_LINE_BYTES = 2**16
"""Bytes of the longest line of a handshake, which limits what an unauthenticated caller can send."""
SPARE_CONNECTIONS = 64
"""Pending callers that are allowed at a time, besides one for each expected node."""
BACKLOG = 1024
"""Connections that the kernel queues until they are accepted; net.core.somaxconn may lower it."""

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class Session:
    """The result of a handshake in which both sides have authenticated: the other side's claims, and the keys for
    `LineChannel.seal`."""

    claims: Message
    """The other side's statements about itself; the handshake has proved that they are unchanged."""
    send_key: bytes
    receive_key: bytes


class HandshakeServer:
    """One handshake, on the side that accepted the connection."""

    def __init__(self, key: bytes, claims: Message) -> None:
        """Prepare one handshake.

        Args:
            key: the secret that both sides know.
            claims: statements of this side about itself, which the caller receives once it has authenticated.
        """
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)

    def challenge(self) -> Message:
        """Return the first line of the handshake, which every caller gets."""
        return {"type": "challenge", "nonce": self._nonce}

    def answer_hello(self, message: Message) -> tuple[Message, Session] | None:
        """Return the line that welcomes the caller, and the session; None if `message`, the caller's answer to the
        challenge, does not prove that the caller knows the key."""
        nonce, claims = message.get("nonce"), message.get("claims")
        if message.get("type") != "hello" or not _is_nonce(nonce) or not isinstance(claims, dict):
            return None
        if not _proves(message.get("proof"), _mac(self._key, "call", self._nonce, nonce, claims)):
            return None
        proof = _mac(self._key, "answer", self._nonce, nonce, claims, self._claims).hex()
        down, up = _session_keys(self._key, self._nonce, nonce)
        return {"type": "welcome", "claims": self._claims, "proof": proof}, Session(claims, down, up)


class HandshakeClient:
    """One handshake, on the side that connected."""

    def __init__(self, key: bytes, claims: Message) -> None:
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._theirs: str | None = None

    def answer_challenge(self, message: Message) -> Message | None:
        """Return the answer to the server's challenge `message`; None if `message` is no challenge, or is the second
        one."""
        nonce = message.get("nonce")
        if self._theirs is not None or message.get("type") != "challenge" or not _is_nonce(nonce):
            return None
        self._theirs = str(nonce)
        proof = _mac(self._key, "call", self._theirs, self._nonce, self._claims).hex()
        return {"type": "hello", "nonce": self._nonce, "claims": self._claims, "proof": proof}

    def verify_welcome(self, message: Message) -> Session | None:
        """Return the session; None if `message`, the server's last line, does not prove that the server knows the
        key."""
        claims = message.get("claims")
        if self._theirs is None or message.get("type") != "welcome" or not isinstance(claims, dict):
            return None
        expected = _mac(self._key, "answer", self._theirs, self._nonce, self._claims, claims)
        if not _proves(message.get("proof"), expected):
            return None
        down, up = _session_keys(self._key, self._theirs, self._nonce)
        return Session(claims, up, down)


def derive_key(key: bytes, *purpose: object) -> bytes:
    """Return a 32-byte secret for the purpose that the values `purpose` name. It reveals neither the key nor the secret
    of another purpose."""
    return _mac(key, "derived", *purpose)


def _mac(key: bytes, *parts: object) -> bytes:
    # JSON keeps the parts apart. It escapes a lone surrogate, so its output is plain ASCII.
    return hmac.digest(key, json.dumps(parts, sort_keys=True).encode(), hashlib.sha256)


def _session_keys(key: bytes, answerer: str, caller: object) -> tuple[bytes, bytes]:
    """Return two keys: for lines from server to client, and for lines from client to server.

    Args:
        key: the run's key.
        answerer: the server's nonce.
        caller: the client's nonce.
    """
    return _mac(key, "down", answerer, caller), _mac(key, "up", answerer, caller)


def _proves(proof: object, expected: bytes) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="surrogatepass"), expected.hex().encode())


def _is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * NONCE_BYTES


@dataclass(frozen=True)
class _PendingPeer:
    """A caller that has not authenticated yet, from the address `addr`, accepted at the monotonic second `since`."""

    since: float
    addr: str
    channel: LineChannel
    proof: HandshakeServer


class AuthListener:
    """A listening socket and its pending callers, which have not authenticated yet. No method blocks."""

    def __init__(
        self,
        addr: str,
        watch: Watch,
        proof: Callable[[], HandshakeServer],
        channel: Callable[[socket.socket], LineChannel],
        peers: int,
        hello_s: float,
    ) -> None:
        """Listen on the IP address `addr` only, on a port that the system chooses.

        Args:
            watch: its `wait` returns when a caller connects or a pending caller sends something.
            proof: makes this side's part of one handshake.
            channel: makes the channel of an accepted connection; the channel's line limit should be MAX_LINE_BYTES.
            peers: number of nodes that are expected to call. Up to this many plus SPARE_CONNECTIONS callers may be
                pending.
            hello_s: seconds after which a caller that has not authenticated is closed.

        Raises:
            OSError: the address is not one of this machine, or no descriptor is free.
        """
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        self._listener = socket.create_server((addr, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._watch = watch
        self._proof = proof
        self._channel = channel
        self._max_pending = peers + SPARE_CONNECTIONS
        self._hello_s = hello_s
        self._pending: list[_PendingPeer] = []
        self._spare: int | None = None
        self._open_spare_descriptor()
        watch.add(self._listener)

    @property
    def address(self) -> tuple[str, int]:
        """The IP address and port of the listening socket."""
        addr, port = self._listener.getsockname()[:2]
        return addr, port

    def accept(self, now: float) -> None:
        """Accept the waiting callers, and send a challenge to each. `now` is in monotonic seconds."""
        self._open_spare_descriptor()
        for _ in range(self._max_pending):
            try:
                sock, caller = self._listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS and self._reject_one():
                    continue
                return  # no caller is waiting
            with contextlib.suppress(OSError):  # it closed already
                self._add_pending(now, sock, str(caller[0]))

    def admit(self, now: float, wanted: Callable[[Message], bool]) -> tuple[LineChannel, Session] | None:
        """Return the channel and the session of the next authenticated caller whose claims `wanted` accepts; None while
        there is none.

        The channel is sealed, takes lines of up to LINE_LIMIT bytes, and stays in the listener's `Watch`. The
        connection of a caller that fails, or takes longer than `hello_s`, is closed. `now` is in monotonic seconds.
        """
        for peer in list(self._pending):
            hello = peer.channel.wait_message(0)
            if hello is None and not peer.channel.closed and now - peer.since < self._hello_s:
                continue
            self._pending.remove(peer)
            taken = None if hello is None else peer.proof.answer_hello(hello)
            if taken is not None and wanted(taken[1].claims) and peer.channel.send(taken[0]):
                session = taken[1]
                peer.channel.seal(session.send_key, session.receive_key)
                peer.channel.line_limit = LINE_LIMIT
                return peer.channel, session
            self._drop(peer.channel)
        return None

    def close(self) -> None:
        """Close the listening socket, and the sockets of callers that have not authenticated yet."""
        self._watch.remove(self._listener)
        self._listener.close()
        for peer in self._pending:
            self._drop(peer.channel)
        self._pending.clear()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _add_pending(self, now: float, sock: socket.socket, addr: str) -> None:
        try:
            peer = _PendingPeer(now, addr, self._channel(sock), self._proof())
        except OSError:
            sock.close()
            raise
        if len(self._pending) >= self._max_pending:
            self._evict_pending()
        # A connection that was reset before it was accepted fails here, and its channel is closed then.
        if peer.channel.send(peer.proof.challenge()):
            self._pending.append(peer)
            self._watch.add(peer.channel)

    def _evict_pending(self) -> None:
        [(crowded, _)] = Counter(peer.addr for peer in self._pending).most_common(1)
        longest = next(peer for peer in self._pending if peer.addr == crowded)
        self._pending.remove(longest)
        self._drop(longest.channel)

    def _reject_one(self) -> bool:
        """Accept the connection of one waiting caller with the spare descriptor, and close the connection. The spare
        descriptor is held open for the time when the process has no other one left. Return False if there is no spare
        descriptor or no caller."""
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        try:
            self._listener.accept()[0].close()
        except OSError:
            return False
        self._open_spare_descriptor()
        return True

    def _open_spare_descriptor(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):  # none is free; the next call tries again
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _drop(self, channel: LineChannel) -> None:
        self._watch.remove(channel)
        channel.close()
