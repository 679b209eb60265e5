"""A mutual proof of two processes that they know a run's key, which itself never crosses the network.

The handshake has three lines: the server sends a challenge, the client answers it and sends its own challenge, and the
server answers that one. A proof is HMAC-SHA256 (RFC 2104) under the key, over the role, both nonces and the claims of
each side. The role prevents reflection of a proof, the nonces prevent replay. A caller without the key sees only a
nonce. After the handshake, every line carries a MAC under keys made of both nonces (`LineChannel.seal`). Pure: the
classes take and return messages, and open no socket.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass

from hpctrain.base.net.wire import Message

NONCE_BYTES = 16
MAX_LINE_BYTES = 2**16
"""Bytes of the longest line of a handshake, which limits what an unauthenticated caller can send."""


@dataclass(frozen=True)
class Session:
    """The result of a handshake in which both sides have authenticated."""

    claims: Message
    """The other side's statements about itself; its proof covers them."""
    send_key: bytes
    receive_key: bytes


class HandshakeServer:
    """The part of the handshake on the side that accepted the connection."""

    def __init__(self, key: bytes, claims: Message) -> None:
        """Prepare one handshake.

        Args:
            key: the secret that both sides know.
            claims: what the caller receives once it has authenticated.
        """
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)

    def challenge(self) -> Message:
        """Return the first line, which every caller gets."""
        return {"type": "challenge", "nonce": self._nonce}

    def answer_hello(self, message: Message) -> tuple[Message, Session] | None:
        """Return the line that welcomes the caller, and the session; None when the caller does not know the key."""
        nonce, claims = message.get("nonce"), message.get("claims")
        if message.get("type") != "hello" or not _is_nonce(nonce) or not isinstance(claims, dict):
            return None
        if not _proves(message.get("proof"), _mac(self._key, "call", self._nonce, nonce, claims)):
            return None
        proof = _mac(self._key, "answer", self._nonce, nonce, claims, self._claims).hex()
        down, up = _session_keys(self._key, self._nonce, nonce)
        return {"type": "welcome", "claims": self._claims, "proof": proof}, Session(claims, down, up)


class HandshakeClient:
    """The part of the handshake on the side that connected."""

    def __init__(self, key: bytes, claims: Message) -> None:
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._theirs: str | None = None

    def answer_challenge(self, message: Message) -> Message | None:
        """Return the answer to the first line; None when that line is no challenge, or not the first."""
        nonce = message.get("nonce")
        if self._theirs is not None or message.get("type") != "challenge" or not _is_nonce(nonce):
            return None
        self._theirs = str(nonce)
        proof = _mac(self._key, "call", self._theirs, self._nonce, self._claims).hex()
        return {"type": "hello", "nonce": self._nonce, "claims": self._claims, "proof": proof}

    def verify_welcome(self, message: Message) -> Session | None:
        """Return the session; None when the other side does not know the key."""
        claims = message.get("claims")
        if self._theirs is None or message.get("type") != "welcome" or not isinstance(claims, dict):
            return None
        expected = _mac(self._key, "answer", self._theirs, self._nonce, self._claims, claims)
        if not _proves(message.get("proof"), expected):
            return None
        down, up = _session_keys(self._key, self._theirs, self._nonce)
        return Session(claims, up, down)


def derive_key(key: bytes, *purpose: object) -> bytes:
    """Return a 32-byte secret for one purpose. It reveals neither the key nor the secret of another purpose."""
    return _mac(key, "derived", *purpose)


def _mac(key: bytes, *parts: object) -> bytes:
    # JSON keeps the parts apart. It escapes a lone surrogate, so its output is plain ASCII.
    return hmac.digest(key, json.dumps(parts, sort_keys=True).encode(), hashlib.sha256)


def _session_keys(key: bytes, answerer: str, caller: object) -> tuple[bytes, bytes]:
    """Return two keys: for lines from server to client, and for lines from client to server."""
    return _mac(key, "down", answerer, caller), _mac(key, "up", answerer, caller)


def _proves(proof: object, expected: bytes) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="surrogatepass"), expected.hex().encode())


def _is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * NONCE_BYTES
