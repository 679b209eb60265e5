"""The worker's end of the agent channel: a thread receives the agent's orders; messages are sent as things happen.

When the agent is gone, the worker exits at once: nothing may train outside a generation.
"""

from __future__ import annotations

import os
import threading

from hpctrain.base.errors import EXIT_RESUMABLE, HpctrainError
from hpctrain.base.net.wire import LineChannel, Message

START_TIMEOUT_S = 120.0
POLL_S = 1.0


class AgentChannel:
    """The orders received from the agent, and the way to send it messages."""

    def __init__(self, channel: LineChannel) -> None:
        self._channel = channel
        # No time limit: an agent may be delayed by its file system; one that is gone closes the channel.
        self._channel.send_timeout_s = None
        self._lock = threading.Lock()
        self._save = threading.Event()
        self._stop = threading.Event()

    def wait_start(self) -> Message:
        """Wait for the `start` order and return it: {plan, rank, store, restore, …}.

        Raises:
            HpctrainError: the agent is gone or sent no such order within `START_TIMEOUT_S`.
        """
        message = self._channel.wait_message(START_TIMEOUT_S)
        if message is None or message.get("type") != "start":
            raise HpctrainError("no start order from the agent")
        return message

    def listen(self) -> None:
        """Start the thread that receives `save` and `stop` orders."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def save_wanted(self) -> bool:
        """Whether the agent ordered a checkpoint. The call clears the order."""
        wanted = self._save.is_set()
        self._save.clear()
        return wanted

    def stop_wanted(self) -> bool:
        """Whether the agent ordered the worker to save and exit."""
        return self._stop.is_set()

    def tell(self, kind: str, /, **content: object) -> None:
        """Send a message to the agent. Kinds are ready, step, compiling, saved, error and others."""
        with self._lock:
            self._channel.send({"type": kind, **content})

    def _listen(self) -> None:
        while not self._channel.closed:
            # A message that arrived with the start order is in the buffer already; the socket does not report it again.
            message = self._channel.wait_message(POLL_S)
            if message is not None:
                self._handle(message)
        # The agent is gone. Nothing needs a flush: the state on disk is consistent at any moment.
        os._exit(EXIT_RESUMABLE)

    def _handle(self, message: Message) -> None:
        if message.get("type") == "save":
            self._save.set()
        elif message.get("type") == "stop":
            self._stop.set()
