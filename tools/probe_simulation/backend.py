"""The ranks of a simulated probe that measure the training backend: what they reply, and when.

All ranks go through the rounds of `worker.measure.measure` together, so a round takes as long as its slowest pair.
The time to form a process group is not simulated, because it was measured for few ranks only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpctrain.base.net.wire import Message
from hpctrain.probe.protocol.messages import LIMIT_S, SIZES, TIMES_MIN, backend_rounds, times_of, warm_up_of
from tools.probe_simulation.fabric import Floats, SimulatedFabric

GLOO_S = 35e-6
"""Seconds that gloo adds to a message one way. Over 1 Gb/s links of a lab, a message took 41 µs with gloo and 6 µs
with TCP alone."""

Reply = tuple[float, str, Message]
"""(simulated seconds at which it is sent, node, message)"""


class SimulatedRanks:
    """The ranks of all nodes that measure the training backend. Their devices take no time and have no figures."""

    def __init__(self, fabric: SimulatedFabric, names: Sequence[str]) -> None:
        self._fabric = fabric
        self._index = {name: place for place, name in enumerate(names)}
        self._ranks: dict[int, tuple[str, float]] = {}

    def replies(self, node: str, order: Message, when: float) -> list[Reply]:
        """Return the replies to an order that reaches a node. The order to exchange messages has no reply until the
        last rank gets it; then all ranks reply, at the simulated time at which the exchange ends.

        Args:
            when: simulated seconds at which the order arrives.
        """
        kind = order["kind"]
        if kind == "devices":
            return [(when, node, {"kind": "ready"})]
        if kind == "go":
            types = {"cpu": {"kind": "cpu", "name": "CPU"}}
            return [(when, node, {"kind": "devices", "report": {"devices": [], "device_types": types}})]
        if kind == "rendezvous":
            return [(when, node, {"kind": "rendezvous", "port": 5001})]
        if kind != "exchange":
            return []
        self._ranks[order["rank"]] = (node, when)
        if len(self._ranks) < order["world"]:
            return []
        return self._exchange(order)

    def _exchange(self, order: Message) -> list[Reply]:
        end = max(when for _, when in self._ranks.values())
        times: dict[int, dict[int, list[tuple[int, float]]]] = {rank: {} for rank in self._ranks}
        for met in backend_rounds(order["world"], order["seed"]):
            end += self._round(met, times)
        return [
            (end, name, {"kind": "exchange", "report": {"backend": order["backend"], "times": times[rank]}})
            for rank, (name, _) in self._ranks.items()
        ]

    def _round(self, met: Sequence[tuple[int, int]], times: dict[int, dict[int, list[tuple[int, float]]]]) -> float:
        """Simulate one round of the exchange. Return its seconds, barrier included.

        Args:
            met: the pairs of ranks of the round.
            times: rank -> other rank -> (bytes, one-way seconds); the round's figures are added.
        """
        ends = [(self._index[self._ranks[a][0]], self._index[self._ranks[b][0]]) for a, b in met]
        figures = self._fabric.measure(ends)
        one_way = figures.latency_s[:, :, 1].mean(axis=1) + GLOO_S
        spent_a, rungs_a = size_sweep_times(one_way, figures.there_bytes_per_s)
        spent_b, rungs_b = size_sweep_times(one_way, figures.back_bytes_per_s)
        for place, (a, b) in enumerate(met):
            times[a][b] = [(size, float(times_s[place])) for size, times_s in zip(SIZES, rungs_a, strict=True)]
            times[b][a] = [(size, float(times_s[place])) for size, times_s in zip(SIZES, rungs_b, strict=True)]
        barrier = 2 * math.ceil(math.log2(max(2, len(self._ranks)))) * float(one_way.max())
        return float((spent_a + spent_b).max()) + barrier


def size_sweep_times(one_way_s: Floats, rate: Floats) -> tuple[Floats, list[Floats]]:
    """Return (seconds of a whole size sweep, one-way seconds of a message of each size in `SIZES`) as
    `worker.measure.measure` would measure them; each array has a value for each pair. A slow link sends fewer of the
    large messages; a real sweep may skip those sizes instead.

    Args:
        one_way_s: seconds of an empty message, by pair.
        rate: bytes per second, by pair.
    """
    spent = np.zeros(len(rate))
    one_way_times = []
    for size in SIZES:
        message_s = one_way_s + size / rate
        wanted = np.where(spent < LIMIT_S, times_of(size), TIMES_MIN) + warm_up_of(size)
        spent = spent + wanted * (message_s + one_way_s)
        one_way_times.append(message_s)
    return spent, one_way_times
