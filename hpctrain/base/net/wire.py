"""JSON lines over a socket, the form of all messages between hpctrain's processes, which `nc` can show; and a wait for
several sockets at once. Long lines between processes that know each other are compressed."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import select
import selectors
import socket
import time
import zlib
from collections import deque
from typing import Any, Protocol

from hpctrain.base.json_text import JsonError, parse_json

Message = dict[str, Any]

LINE_LIMIT = 1 << 20
"""Bytes of the longest line that is accepted; no process of hpctrain sends a longer one."""
COMPRESS_BYTES = 1 << 16
"""Longest line that is not compressed, in bytes. A socket's buffer takes it whole, also on systems with small
buffers."""
MESSAGE_LIMIT = 1 << 24
"""Bytes of the longest message, before it is compressed."""
_COMPRESSED = b"z"
"""First byte of a compressed line, in which base64 of a zlib stream follows. A JSON object begins with '{'."""
SEND_TIMEOUT_S = 10.0
MAC_CHARS = 64
"""Characters of the MAC (HMAC-SHA256 as hex) at the beginning of a sealed line; a space and the message follow."""
READ_BYTES = 1 << 16
READS_AT_ONCE = 16


class MalformedMessage(Exception):  # noqa: N818 - the state of a connection, handled where messages are read
    """A message is not one that hpctrain sends. The text gives the reason, for the log of the side that closes the
    connection."""


class LineChannel:
    """A socket that carries one JSON object a line. The limits on time and bytes keep a slow reader and a flood of
    lines from blocking this process.

    `receive` returns the messages that have arrived. `closed` becomes true when this side closes the channel, when the
    other side is gone, or when the other side sends a line that breaks the format.
    """

    def __init__(
        self,
        sock: socket.socket,
        send_timeout_s: float | None = SEND_TIMEOUT_S,
        line_limit: int = LINE_LIMIT,
        strict: bool = False,
        compress: bool = False,
    ) -> None:
        """Take over a connected socket.

        Args:
            send_timeout_s: seconds that `send` waits for a reader that does not read; 0: not at all, None: without
                limit.
            line_limit: bytes of the longest line that is accepted; a longer one closes the channel.
            strict: whether a line that is not a JSON object closes the channel; else the line is skipped.
            compress: whether long lines are compressed on their way, and compressed ones accepted. `seal` sets it.
        """
        self.sock = sock
        self.send_timeout_s = send_timeout_s
        self.line_limit = line_limit
        self.strict = strict
        self.compress = compress
        self.closed = False
        self.fault = ""
        """The rule that the other side broke, if this side closed for that; empty if the other side closed."""
        self._partial = b""
        self._lines: deque[bytes] = deque()
        self._send_seal: LineMac | None = None
        self._receive_seal: LineMac | None = None

    def seal(self, send_key: bytes, receive_key: bytes) -> None:
        """Add a MAC to every line from now on, and compress long ones; a received line without the right MAC closes the
        channel.

        The MAC covers the line's number, so a line can be neither replayed nor left out.
        """
        self._send_seal, self._receive_seal = LineMac(send_key), LineMac(receive_key)
        self.compress = True

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message. Return False when the other side is gone or did not read within `send_timeout_s`; the
        channel is closed then.

        Raises:
            ValueError: a number in the message is not finite.
        """
        line = json.dumps(message, allow_nan=False).encode()
        if self.compress and len(line) > COMPRESS_BYTES:
            line = _COMPRESSED + base64.b64encode(zlib.compress(line, 1))
        if self._send_seal is not None:
            line = self._send_seal.mac(line) + b" " + line
        unsent = memoryview(line + b"\n")
        deadline = _deadline(self.send_timeout_s)
        try:
            while unsent := unsent[self._write(unsent) :]:
                if not self._ready(select.POLLOUT, deadline):
                    # Part of a line may be sent, and nothing else can follow it: give up this reader.
                    self.close()
                    return False
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> list[Message]:
        """Return the whole messages that have arrived, without waiting; a call reads at most 1 MiB."""
        for _ in range(READS_AT_ONCE):
            if not self._fill():
                break
        messages = []
        while (message := self._take_one()) is not None:
            messages.append(message)
        return messages

    def wait_message(self, timeout_s: float | None) -> Message | None:
        """Wait for the next message and return it; None when none came within `timeout_s` seconds (None: no limit), or
        when the other side is gone."""
        deadline = _deadline(timeout_s)
        if not self._lines:
            self._fill()
        while (message := self._take_one()) is None and not self.closed:
            # The deadline counts also while data arrives all the time.
            passed = deadline is not None and time.monotonic() >= deadline
            if passed or not self._ready(select.POLLIN, deadline):
                return None
            self._fill()
        return message

    def close(self) -> None:
        """Close the socket; messages that arrived before stay readable by `receive`."""
        self.closed = True
        self.sock.close()

    def refuse(self, fault: str) -> None:
        """Close the socket because the other side broke a rule, which `fault` names."""
        self.fault = self.fault or fault
        self.close()

    def _write(self, data: memoryview) -> int:
        """Write to the socket without waiting; return how many bytes it took."""
        self._leave_waiting_to_us()
        try:
            return self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _fill(self) -> bool:
        """Read bytes that have arrived, at most READ_BYTES, without waiting. Return False when there were none or the
        channel is closed."""
        if self.closed:
            return False
        try:
            self._leave_waiting_to_us()
            data = self.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(line for line in lines if len(line) <= self.line_limit)
        if any(len(line) > self.line_limit for line in (*lines, self._partial)):
            self._partial = b""
            self.refuse(f"it sent a line of more than {self.line_limit} bytes")
        return not self.closed

    def _leave_waiting_to_us(self) -> None:
        # A socket with a timeout of its own would wait that long in spite of MSG_DONTWAIT.
        if self.sock.gettimeout():
            self.sock.setblocking(True)

    def _ready(self, event: int, deadline: float | None) -> bool:
        """Wait until the socket is ready for `event` (select.POLLIN or POLLOUT) or the other side is gone. Return False
        at the deadline (seconds of time.monotonic; None: no limit)."""
        poll = select.poll()
        try:
            poll.register(self.sock, event)
        except ValueError:
            return False  # another thread closed it
        return bool(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))

    def _take_one(self) -> Message | None:
        while self._lines:
            line = self._lines.popleft()
            if self._receive_seal is not None:
                mac, line = line[:MAC_CHARS], line[MAC_CHARS + 1 :]
                # Nothing is parsed before its sender is verified.
                if not hmac.compare_digest(mac, self._receive_seal.mac(line)):
                    self._lines.clear()
                    self.refuse("it sent a line without the right MAC")
                    return None
            with contextlib.suppress(JsonError):
                message = parse_json(_expanded(line) if self.compress and line[:1] == _COMPRESSED else line)
                if isinstance(message, dict):
                    return message
            if self.strict:
                self._lines.clear()
                self.refuse("it sent a line that is no message")
            # Else the line is skipped: a stray writer on the port cannot stop an agent.
        return None


class LineMac:
    """Makes the MACs of one direction of a channel; each covers a line and its number."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def mac(self, line: bytes) -> bytes:
        """Return the MAC, as hex, of `line` and its number. The first call has the number 0, and each further call the
        next one, so call this once for each line of the channel, in their order."""
        number, self._count = self._count, self._count + 1
        return hmac.digest(self._key, number.to_bytes(8, "big") + line, hashlib.sha256).hex().encode()


def _expanded(line: bytes) -> bytes:
    """Return the message in a compressed line.

    Raises:
        JsonError: the line is malformed, or its message is longer than `MESSAGE_LIMIT`.
    """
    stream = zlib.decompressobj()
    try:
        message = stream.decompress(base64.b64decode(line[1:], validate=True), MESSAGE_LIMIT)
    except (binascii.Error, zlib.error) as error:
        raise JsonError(f"not a compressed line: {error}") from None
    if not stream.eof or stream.unused_data:
        raise JsonError(f"not a whole message of up to {MESSAGE_LIMIT} bytes")
    return message


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


class Watchable(Protocol):
    """Anything with a file descriptor, such as a socket or a LineChannel."""

    def fileno(self) -> int:
        """Return the file descriptor; -1 once it is closed."""


class Watch:
    """A set of sockets and channels to wait for. Adding a closed one does nothing, and one may be closed while it is
    watched."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, file: Watchable, events: int = selectors.EVENT_READ) -> None:
        """Let `wait` return when one of `events` (selectors.EVENT_READ, EVENT_WRITE) happens on `file`."""
        if file.fileno() < 0:
            return  # closed already: nothing will happen on it
        stale = self._selector.get_map().get(file.fileno())
        if stale is not None:
            # A file was closed without being removed, and the system gave its number to this one.
            self._selector.unregister(stale.fileobj)
        self._selector.register(file, events)

    def remove(self, file: Watchable) -> None:
        """Stop watching `file`; do nothing if it is not watched."""
        for key in list(self._selector.get_map().values()):
            # By identity: a closed file has no descriptor to find it by.
            if key.fileobj is file:
                self._selector.unregister(file)

    def wait(self, seconds: float) -> None:
        """Return when a watched socket or channel is ready for one of the events given to `add`, at the latest after
        `seconds` seconds."""
        self._selector.select(seconds)

    def close(self) -> None:
        """Stop watching all sockets and channels; they stay open."""
        self._selector.close()
