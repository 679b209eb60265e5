"""Two processes prove to each other that they know a run's key, without the key ever crossing the network.

Three lines: the side that was called sends a challenge, the caller answers it and sets its own, the side that was
called answers that. A proof is HMAC-SHA256 (RFC 2104) under the key, over the role, both nonces and what each side
says about itself; the role and the nonces keep a proof from being sent back, or again. Whoever only connects gets to
see a nonce.
From then on every line carries a MAC under keys made of both nonces (`LineChannel.seal`). Pure: messages in and out.
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
"""Bytes of the longest line of a handshake: all that is taken from somebody who has not proved anything."""


@dataclass(frozen=True)
class Session:
    """What both sides have once each of them has proved itself."""

    claims: Message
    """What the other side says about itself; covered by its proof."""
    send_key: bytes
    receive_key: bytes


class HandshakeServer:
    """The side that was called."""

    def __init__(self, key: bytes, claims: Message) -> None:
        """
        Args:
            key: the secret that both sides know.
            claims: what to tell the caller, once it has proved itself.
        """
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)

    def challenge(self) -> Message:
        """The first line, to whoever connects."""
        return {"type": "challenge", "nonce": self._nonce}

    def answer_hello(self, message: Message) -> tuple[Message, Session] | None:
        """The line that welcomes the caller, and the session; None when it does not know the key."""
        nonce, claims = message.get("nonce"), message.get("claims")
        if message.get("type") != "hello" or not _is_nonce(nonce) or not isinstance(claims, dict):
            return None
        if not _proves(message.get("proof"), _mac(self._key, "call", self._nonce, nonce, claims)):
            return None
        proof = _mac(self._key, "answer", self._nonce, nonce, claims, self._claims).hex()
        down, up = _session_keys(self._key, self._nonce, nonce)
        return {"type": "welcome", "claims": self._claims, "proof": proof}, Session(claims, down, up)


class HandshakeClient:
    """The side that connected."""

    def __init__(self, key: bytes, claims: Message) -> None:
        self._key = key
        self._claims = claims
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._theirs: str | None = None

    def answer_challenge(self, message: Message) -> Message | None:
        """The line that answers the first one; None when that was no challenge, or not the first."""
        nonce = message.get("nonce")
        if self._theirs is not None or message.get("type") != "challenge" or not _is_nonce(nonce):
            return None
        self._theirs = str(nonce)
        proof = _mac(self._key, "call", self._theirs, self._nonce, self._claims).hex()
        return {"type": "hello", "nonce": self._nonce, "claims": self._claims, "proof": proof}

    def verify_welcome(self, message: Message) -> Session | None:
        """The session; None when the other side does not know the key."""
        claims = message.get("claims")
        if self._theirs is None or message.get("type") != "welcome" or not isinstance(claims, dict):
            return None
        expected = _mac(self._key, "answer", self._theirs, self._nonce, self._claims, claims)
        if not _proves(message.get("proof"), expected):
            return None
        down, up = _session_keys(self._key, self._theirs, self._nonce)
        return Session(claims, up, down)


def derive_key(key: bytes, *purpose: object) -> bytes:
    """A secret for one purpose, of which neither the key nor another one can be told; 32 bytes."""
    return _mac(key, "derived", *purpose)


def _mac(key: bytes, *parts: object) -> bytes:
    # JSON keeps the parts apart. A lone surrogate, which JSON can carry, is escaped in it: plain ASCII comes out.
    return hmac.digest(key, json.dumps(parts, sort_keys=True).encode(), hashlib.sha256)


def _session_keys(key: bytes, answerer: str, caller: object) -> tuple[bytes, bytes]:
    """(from the side that was called to the caller, and the other way)."""
    return _mac(key, "down", answerer, caller), _mac(key, "up", answerer, caller)


def _proves(proof: object, expected: bytes) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="surrogatepass"), expected.hex().encode())


def _is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * NONCE_BYTES
