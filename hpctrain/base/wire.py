"""JSON lines over a socket: the one message form between processes, readable with `nc` and in a debugger."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class LineChannel:
    """A socket that carries one JSON object a line. Never blocks a reader longer than asked.

    `receive` returns what has arrived; `closed` becomes true when the other side is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._buffer = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other side is gone (the channel is closed then)."""
        try:
            self.sock.setblocking(True)
            self.sock.sendall(json.dumps(message, allow_nan=False).encode() + b"\n")
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> list[Message]:
        """All whole messages that have arrived; an empty list when there is none yet."""
        while not self.closed:
            try:
                data = self.sock.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._buffer += data
        return self._take()

    def wait_message(self, timeout_s: float | None) -> Message | None:
        """Block for the next message; None when none came in time or the other side is gone."""
        pending = self._take_one()
        if pending is not None:
            return pending
        self.sock.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                data = self.sock.recv(65536)
            except (TimeoutError, socket.timeout):
                return None
            except OSError:
                data = b""
            if not data:
                self.close()
                return None
            self._buffer += data
        return self._take_one()

    def close(self) -> None:
        """Close the socket; messages that arrived before stay readable by `receive`."""
        self.closed = True
        self.sock.close()

    def _take(self) -> list[Message]:
        messages = []
        while (message := self._take_one()) is not None:
            messages.append(message)
        return messages

    def _take_one(self) -> Message | None:
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            try:
                message = json.loads(line)
            except ValueError:
                continue  # not ours: a stray writer on the port cannot stop an agent
            if isinstance(message, dict):
                return message
        return None
