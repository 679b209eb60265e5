"""The ranks of a simulated probe that measure the training backend: their replies, and when they send them.

All ranks go through the rounds of `worker.measure.measure` together, so a round takes as long as its slowest
pair. The time to form a process group is not simulated: it was measured for few ranks only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpctrain.base.net.wire import Message
from hpctrain.probe.protocol.messages import LIMIT_S, SIZES, TIMES_MIN, backend_rounds, times_of, warm_up_of
from tools.probe_simulation.fabric import Floats, SimulatedFabric

GLOO_S = 35e-6
"""Time that gloo adds to a message one way: over 1 Gb/s links of a lab 41 µs against 6 µs of TCP."""

Reply = tuple[float, str, Message]
"""(time, node, message)"""


class SimulatedRanks:
    """The measuring processes of all nodes; their devices take no time and have no figures."""

    def __init__(self, fabric: SimulatedFabric, names: Sequence[str]) -> None:
        self._fabric = fabric
        self._index = {name: place for place, name in enumerate(names)}
        self._ranks: dict[int, tuple[str, float]] = {}

    def replies(self, node: str, order: Message, when: float) -> list[Reply]:
        """Return the replies to a message that reaches `node` at `when`. All ranks reply at once when the last one is
        asked to exchange messages."""
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
        """Return the seconds of one round, barrier included; adds its figures to `times`."""
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
    """Return the seconds that `worker.measure.measure` takes for its size sweep, and the one-way time of each
    size, for pairs with these latencies and rates. A slow link sends fewer of the large sizes here, while a real one
    may skip them."""
    spent = np.zeros(len(rate))
    one_way_times = []
    for size in SIZES:
        message_s = one_way_s + size / rate
        wanted = np.where(spent < LIMIT_S, times_of(size), TIMES_MIN) + warm_up_of(size)
        spent = spent + wanted * (message_s + one_way_s)
        one_way_times.append(message_s)
    return spent, one_way_times
