"""JSON lines over a socket: the one message form between processes, readable with `nc` and in a debugger."""

from __future__ import annotations

import json
import select
import socket
import time
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
        while self._fill():
            pass
        return self._take()

    def wait_message(self, timeout_s: float | None) -> Message | None:
        """Block for the next message; None when none came in time or the other side is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._take_one()) is None and not self.closed:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._readable(left):
                return None
            self._fill()
        return message

    def close(self) -> None:
        """Close the socket; messages that arrived before stay readable by `receive`."""
        self.closed = True
        self.sock.close()

    def _fill(self) -> bool:
        """Move what has arrived to the buffer, without waiting; False when there is nothing now."""
        if self.closed:
            return False
        try:
            # A socket with a timeout of its own would wait that long in spite of the flag.
            if self.sock.gettimeout():
                self.sock.setblocking(True)
            data = self.sock.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._buffer += data
        return True

    def _readable(self, timeout_s: float | None) -> bool:
        """Wait until something arrives or the other side is gone; False when neither happened in time."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

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
