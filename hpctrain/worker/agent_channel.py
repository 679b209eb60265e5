"""The worker's end of the channel to its agent: orders come in on a thread, news go out as they happen.

When the agent is gone the worker ends at once: nothing may train outside a generation.
"""

from __future__ import annotations

import os
import threading

from hpctrain.base.errors import EXIT_RESUMABLE, HpctrainError
from hpctrain.base.net.wire import LineChannel, Message

START_TIMEOUT_S = 120.0
POLL_S = 1.0


class AgentChannel:
    """What the agent asked for, and a way to tell it things."""

    def __init__(self, channel: LineChannel) -> None:
        self._channel = channel
        # An agent that is held up by its file system is waited for; one that is gone closes the channel.
        self._channel.send_timeout_s = None
        self._lock = threading.Lock()
        self._save = threading.Event()
        self._stop = threading.Event()

    def wait_start(self) -> Message:
        """The `start` order: {plan, rank, store, restore, …}.

        Raises:
            HpctrainError: the agent went away or sent none in time.
        """
        message = self._channel.wait_message(START_TIMEOUT_S)
        if message is None or message.get("type") != "start":
            raise HpctrainError("no start order from the agent")
        return message

    def listen(self) -> None:
        """Start taking `save` and `stop` orders in the background."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def save_wanted(self) -> bool:
        """Whether a checkpoint was ordered; asking clears it."""
        wanted = self._save.is_set()
        self._save.clear()
        return wanted

    def stop_wanted(self) -> bool:
        """Whether the worker was ordered to save and leave."""
        return self._stop.is_set()

    def tell(self, kind: str, /, **content: object) -> None:
        """Send news to the agent: ready, step, compiling, saved, error."""
        with self._lock:
            self._channel.send({"type": kind, **content})

    def _listen(self) -> None:
        while not self._channel.closed:
            # What arrived together with the start order is there already, and the socket silent about it.
            message = self._channel.wait_message(POLL_S)
            if message is not None:
                self._handle(message)
        # The agent is gone. Nothing is flushed on purpose: the state on disk is whole at any moment.
        os._exit(EXIT_RESUMABLE)

    def _handle(self, message: Message) -> None:
        if message.get("type") == "save":
            self._save.set()
        elif message.get("type") == "stop":
            self._stop.set()
