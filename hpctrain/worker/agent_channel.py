"""The worker's end of the agent channel: a thread receives the agent's orders to end, and the worker sends its reports.

A worker exits at once when its agent is gone, because nobody else could end the worker together with its generation.
"""

from __future__ import annotations

import os
import sys
import threading
from enum import IntEnum

from hpctrain.agent.worker_messages import ChangePlanOrder, Order, Report, StartOrder, StopOrder, read_order
from hpctrain.base.errors import EXIT_FAILED, EXIT_RESUMABLE, HpctrainError
from hpctrain.base.net.wire import LineChannel, MalformedMessage

START_TIMEOUT_S = 120.0
"""Seconds that a worker waits for the start order."""
POLL_S = 1.0


class Ending(IntEnum):
    """How the agents have ordered the training to end after the step under way. If orders differ, the highest value
    counts."""

    NONE = 0
    """The training goes on."""
    NEW_PLAN = 1
    """The next generation starts from the state in memory, with another plan."""
    NEW_PLAN_AND_CHECKPOINT = 2
    """As NEW_PLAN, and a checkpoint is saved first."""
    STOP = 3
    """A checkpoint is saved, and the attempt ends."""


class AgentChannel:
    """A worker's connection to its agent: it receives the agent's orders and sends the worker's reports."""

    def __init__(self, channel: LineChannel) -> None:
        self._channel = channel
        # There is no time limit: an agent may be delayed by its file system, and an agent that is gone closes the
        # channel.
        self._channel.send_timeout_s = None
        self._lock = threading.Lock()
        self._ending = Ending.NONE

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
        """Start the thread that receives orders to end. The thread ends the process when the agent is gone."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def stop_wanted(self) -> bool:
        """Return whether the agent has ordered the worker to save a checkpoint and exit."""
        return self._ending is Ending.STOP

    def ending(self) -> Ending:
        """Return how the agent has ordered the training to end."""
        return self._ending

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
                if message is not None:
                    self._ending = max(self._ending, _ending_of(read_order(message)))
            except MalformedMessage as error:
                self._channel.refuse(str(error))
        if self._channel.fault:
            print(f"hpctrain worker: left its agent: {self._channel.fault}", file=sys.stderr, flush=True)
        # Nothing needs a flush, because the state on disk is consistent at any moment.
        os._exit(EXIT_FAILED if self._channel.fault else EXIT_RESUMABLE)


def _ending_of(order: Order) -> Ending:
    match order:
        case StopOrder():
            return Ending.STOP
        case ChangePlanOrder():
            return Ending.NEW_PLAN_AND_CHECKPOINT if order.save else Ending.NEW_PLAN
    return Ending.NONE
