"""The worker's end of the agent channel: a thread receives the agent's stop order, and the worker sends its reports.

A worker exits at once when its agent is gone, because nobody else could end the worker together with its generation.
"""

from __future__ import annotations

import os
import sys
import threading

from hpctrain.agent.worker_messages import Report, StartOrder, StopOrder, read_order
from hpctrain.base.errors import EXIT_FAILED, EXIT_RESUMABLE, HpctrainError
from hpctrain.base.net.wire import LineChannel, MalformedMessage

START_TIMEOUT_S = 120.0
"""Seconds that a worker waits for the start order."""
POLL_S = 1.0


class AgentChannel:
    """A worker's connection to its agent: it receives the agent's orders and sends the worker's reports."""

    def __init__(self, channel: LineChannel) -> None:
        self._channel = channel
        # There is no time limit: an agent may be delayed by its file system, and an agent that is gone closes the
        # channel.
        self._channel.send_timeout_s = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def wait_start(self) -> StartOrder:
        """Wait for the start order and return it.

        Raises:
            HpctrainError: the agent is gone, sent another message, or sent nothing within `START_TIMEOUT_S`.
        """
        message = self._channel.wait_message(START_TIMEOUT_S)
        try:
            order = None if message is None else read_order(message)
        except MalformedMessage as error:
            raise HpctrainError(f"no start order from the agent: {error}") from None
        if not isinstance(order, StartOrder):
            raise HpctrainError("no start order from the agent")
        return order

    def listen(self) -> None:
        """Start the thread that receives stop orders. The thread ends the process when the agent is gone."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def stop_wanted(self) -> bool:
        """Return whether the agent has ordered the worker to save a checkpoint and exit."""
        return self._stop.is_set()

    def send(self, report: Report) -> None:
        """Send a report to the agent."""
        with self._lock:
            self._channel.send(report.to_json())

    def _listen(self) -> None:
        while not self._channel.closed:
            # A message that arrived together with the start order is already in the buffer; the socket does not report
            # it again.
            message = self._channel.wait_message(POLL_S)
            try:
                if message is not None and isinstance(read_order(message), StopOrder):
                    self._stop.set()
            except MalformedMessage as error:
                self._channel.refuse(str(error))
        if self._channel.fault:
            print(f"hpctrain worker: left its agent: {self._channel.fault}", file=sys.stderr, flush=True)
        # Nothing needs a flush, because the state on disk is consistent at any moment.
        os._exit(EXIT_FAILED if self._channel.fault else EXIT_RESUMABLE)
