"""Writes the progress of the probe before the training as events of the run, so that `hpctrain status`, `hpctrain
watch` and the logs show it."""

from __future__ import annotations

from hpctrain.agent.event_log import EventLog
from hpctrain.base.clock import Clock

EVERY_S = 2.0
"""Fewest seconds between two events of one phase."""

_WORDS = {
    "join": "{done} of {planned} nodes have come",
    "links": "the links between the nodes, {done} of {planned} rounds are done",
    "devices": "the devices, {done} of {planned} nodes have loaded what measures them",
    "backend": "messages over the training backend between {planned} nodes",
}


class ProbeProgress:
    """A progress callback with (phase, done, planned) that writes an event when a phase begins, and at each further
    quarter of the phase."""

    def __init__(self, event_log: EventLog, clock: Clock) -> None:
        self._event_log = event_log
        self._clock = clock
        self._phase = ""
        self._quarter = 0
        self._written = float("-inf")

    def __call__(self, phase: str, done: int, planned: int) -> None:
        if not planned:
            return  # one node has no links
        now, quarter = self._clock.now(), 4 * done // planned
        if phase == self._phase and (quarter <= self._quarter or now - self._written < EVERY_S):
            return
        self._phase, self._quarter, self._written = phase, quarter, now
        words = _WORDS[phase].format(done=done, planned=planned)
        self._event_log.write("probing", -1, words, phase=phase, done=done, planned=planned)
