"""The nodes of a probe on a simulated clock, as a transport of the real coordinator.

Each message costs the coordinator time, and messages have a latency. A pair connects, pings, makes its size sweep
and its transfers for as long as the fabric's figures say; so do the ranks that measure the training backend. The
nodes measure their devices in no time. Nodes may die, hang or never join.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.base.net.wire import Message
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.connections import ConnectionLost
from hpctrain.probe.protocol.messages import Answer, Join, read_answer, read_join
from hpctrain.probe.protocol.pair_measurement import BLOCK_BYTES, MIN_MESSAGES, PING_BYTES
from tools.probe_simulation.backend import SimulatedRanks
from tools.probe_simulation.fabric import Floats, Ints, SimulatedFabric

SEND_S = 20e-6
"""Seconds of the coordinator for sending one message: on one core of a cloud machine with 400 sockets, 5 to 25 µs."""
RECEIVE_S = 20e-6
"""Seconds of the coordinator for receiving one message, measured over 400 sockets on one core of a cloud machine."""
KEEP_S = 25e-6
"""Additional seconds of the coordinator for a reply with figures. On one core of a cloud machine, reading and
checking the figures took 10 µs, and fitting a line through the times of its messages 14 µs."""
CONNECT_TRIPS = 4
"""Round trips of a pair before its first ping: the connection, the hello, the welcome and the wake-up of the peer."""


class SimulatedClock:
    """A clock that advances only when the simulation sets it or somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass(frozen=True)
class Failures:
    """Nodes that fail during the probe, by number of the node; times are simulated seconds."""

    absent: frozenset[int] = frozenset()
    """Nodes that never join."""
    dies_at: dict[int, float] = field(default_factory=dict)
    """Node -> when its process ends; the operating system then closes its connections."""
    hangs_at: dict[int, float] = field(default_factory=dict)
    """Node -> from when on it keeps its connections and sends nothing more."""


@dataclass(frozen=True)
class _Measurement:
    """The measurement of a pair as one of its two nodes makes it."""

    node: int
    peer: int
    begin: float
    end: float
    latency: Floats
    """Seconds: minimum, median, 95th percentile."""
    bytes_per_s: float
    """Rate at which this node receives."""
    ladder: list[tuple[int, float]]
    """The size sweep: (bytes, one-way seconds) by size."""


class SimulatedTransport:
    """A transport of the coordinator whose nodes run on a simulated clock and measure a simulated fabric."""

    def __init__(
        self,
        fabric: SimulatedFabric,
        names: Sequence[str],
        clock: SimulatedClock,
        settings: ProbeSettings,
        failures: Failures | None = None,
        switches: bool = False,
    ) -> None:
        """Create the nodes.

        Args:
            switches: whether the nodes know Slurm's names of the switches above them.
        """
        self._fabric = fabric
        self._names = list(names)
        self._index = {name: index for index, name in enumerate(names)}
        self._clock = clock
        self._settings = settings
        self._failures = failures or Failures()
        self._switches = switches
        self._joining = [index for index in range(len(names)) if index not in self._failures.absent]
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, Message | None]] = []
        self._calls: list[tuple[int, int, int, float]] = []
        self._arrivals: dict[int, float] = {}
        self._ranks = SimulatedRanks(fabric, names)
        for node, when in self._failures.dies_at.items():
            self._at(when, self._names[node], None)

    def admit(self, expected: set[str], deadline: float) -> Join | None:
        """Return the join message of the next node; None if no node joins before `deadline`.

        Args:
            expected: names of the nodes that may join.
            deadline: simulated seconds.
        """
        if not self._joining:
            self._clock.time = deadline
            return None
        self._clock.time += RECEIVE_S
        index = self._joining.pop(0)
        above = f"core.pod{self._fabric.pod[index]}.leaf{self._fabric.leaf[index]}.{self._names[index]}"
        place = {"addr": f"10.0.{index // 256}.{index % 256}", "port": 5000, "iface": "eth0", "host": None}
        declared = {"switches": above} if self._switches else {}
        return read_join({"kind": "join", "node": self._names[index], **place, **declared})

    def send(self, node: str, message: Message) -> None:
        """Send one message to a node. If the node's connection is lost, `receive` says so."""
        self._clock.time += SEND_S
        index = self._index[node]
        arrival = self._clock.time + self._fabric.spec.latency_s
        if message["kind"] != "pair":
            for when, name, answer in self._ranks.replies(node, message, arrival):
                if not self._gone(self._index[name], when):
                    self._at(when + self._fabric.spec.latency_s, name, answer)
            return
        self._arrivals[index] = arrival
        if message["caller"]:
            self._calls.append((message["round"], index, self._index[message["peer"]], arrival))

    def receive(self, seconds: float) -> Iterator[tuple[str, Answer | ConnectionLost]]:
        """Wait up to `seconds`. Yield (node, answer) for each answer that arrived, and (node, `ConnectionLost`) for
        a node that died."""
        self._measure()
        limit = self._clock.time + seconds
        if not self._events or self._events[0][0] > limit:
            self._clock.time = limit
            return
        self._clock.time = max(self._clock.time, self._events[0][0])
        while self._events and self._events[0][0] <= self._clock.time:
            _, _, name, message = heapq.heappop(self._events)
            self._clock.time += RECEIVE_S + (KEEP_S if message and "figures" in message else 0.0)
            yield name, ConnectionLost() if message is None else read_answer(message)

    def close(self) -> None:
        """Close every connection."""

    def _at(self, when: float, name: str, message: Message | None) -> None:
        heapq.heappush(self._events, (when, next(self._order), name, message))

    def _measure(self) -> None:
        """Measure the pairs that the coordinator has ordered to measure, and queue their replies."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        pairs = [(a, b) for _, a, b, _ in calls]
        figures = self._fabric.measure(pairs)
        trip = figures.latency_s[:, :, 1].mean(axis=1) * 2
        pings = 2 * (self._settings.pings + self._settings.ping_warm_up) + CONNECT_TRIPS
        there, back = figures.there_bytes_per_s, figures.back_bytes_per_s
        up, rungs_up = self._ladder_s(trip, there)
        down, rungs_down = self._ladder_s(trip, back)
        busy = pings * trip + up + down + self._transfer_s(there) + self._transfer_s(back)
        for place, (number, a, b, arrival) in enumerate(calls):
            begin = max(arrival, self._arrivals[b])
            end = begin + float(busy[place])
            at_a, at_b = figures.latency_s[place]
            to_b, to_a = float(there[place]), float(back[place])
            sweep_a, sweep_b = self._rungs(at_a, to_b, rungs_up[place]), self._rungs(at_b, to_a, rungs_down[place])
            self._answer(number, _Measurement(a, b, begin, end, at_a, to_a, sweep_a))
            self._answer(number, _Measurement(b, a, begin, end, at_b, to_b, sweep_b))

    def _ladder_s(self, trip: Floats, rate: Floats) -> tuple[Floats, Ints]:
        """Return (seconds of the size sweep, number of sizes that it reaches) in one direction for each pair, as
        `size_sweep` in `probe.protocol.pair_measurement` would make it.

        Args:
            trip: seconds of a round trip, by pair.
            rate: bytes per second, by pair.
        """
        settings = self._settings
        spent, rungs = np.zeros(len(trip)), np.zeros(len(trip), dtype=np.int_)
        for size in settings.ladder_bytes:
            message_s = trip + size / rate
            going = spent < settings.ladder_limit_s
            in_time = np.ceil((settings.ladder_limit_s - spent) / message_s)
            count = np.minimum(settings.ladder_times, np.maximum(MIN_MESSAGES, in_time + 1))
            spent = np.where(going, spent + count * message_s, spent)
            rungs += going
        return spent, rungs

    def _rungs(self, latency: Floats, rate: float, count: int) -> list[tuple[int, float]]:
        return [(size, float(latency[1]) + size / rate) for size in self._settings.ladder_bytes[:count]]

    def _transfer_s(self, rate: Floats) -> Floats:
        """Return for each pair the seconds of the transfers in one direction, as `stream_send` in
        `probe.protocol.pair_measurement` would make them.

        Args:
            rate: bytes per second, by pair.
        """
        settings = self._settings
        enough = np.maximum(settings.bulk_bytes / rate, settings.bulk_s)
        least = 8 * BLOCK_BYTES / rate
        limited: Floats = np.minimum(np.minimum(enough, settings.bulk_bytes_max / rate), settings.bulk_limit_s)
        return np.maximum(limited, least) + PING_BYTES / rate

    def _answer(self, number: int, made: _Measurement) -> None:
        """Queue the reply of one node of a pair. If the other node is dead or hangs, the reply comes late and has no
        figures; if this node is, there is no reply.

        Args:
            number: number of the round.
        """
        answer: Message = {"kind": "pair", "round": number}
        end = made.end
        if self._gone(made.node, end):
            return
        if self._gone(made.peer, end):
            died_at = self._failures.dies_at.get(made.peer, math.inf)
            died = died_at <= end
            end = max(made.begin, died_at) if died else made.begin + self._settings.slot_deadline_s
            answer["error"] = "the peer closed the connection" if died else "the peer stopped sending"
        else:
            low, middle, high = (float(value) for value in made.latency)
            figures = {"latency": {"min": low, "p50": middle, "p95": high}, "bytes_per_s": made.bytes_per_s, "n": 8}
            answer["figures"] = figures | {"ladder": made.ladder}
        self._at(end + self._fabric.spec.latency_s, self._names[made.node], answer)

    def _gone(self, node: int, when: float) -> bool:
        return min(self._failures.dies_at.get(node, math.inf), self._failures.hangs_at.get(node, math.inf)) <= when
