"""Simulates a step many times with random delays. Each simulated step is a draw; every array holds one value for each
draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.links import ring_hops
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.engine import ActionProgram, StageDurations, named_program
from hpctrain.planner.simulate.predict import SimulatedStep, simulate_step
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.topology import Topology

FloatArray = NDArray[np.float64]

P95_OVER_MEAN = math.log(20)
"""95th percentile of an exponential distribution, divided by its mean."""
P50_TO_P95_OVER_MEAN = P95_OVER_MEAN - math.log(2)
"""Difference between the 95th and the 50th percentile of an exponential distribution, divided by its mean."""


class LinkJitter:
    """The delay of messages beyond their median: exponential, fitted to the probe's p50 and p95 of each link.

    The object is false if no link has such a delay.
    """

    def __init__(self, topology: Topology) -> None:
        self._mean: dict[tuple[str, str], float] = {}
        for link in topology.fabric.links:
            for ends, figures in (((link.a, link.b), link.ab), ((link.b, link.a), link.ba)):
                if figures.latency_s is not None and figures.latency_s.p95 > figures.latency_s.p50:
                    self._mean[ends] = (figures.latency_s.p95 - figures.latency_s.p50) / P50_TO_P95_OVER_MEAN
        if topology.pairs is not None:
            # Topologies of large clusters hold these figures in a matrix, with NaN for pairs that were not measured.
            later = topology.pairs["latency_p95_s"] - topology.pairs["latency_p50_s"]
            nodes = topology.pairs.nodes
            for a, b in np.argwhere(later > 0).tolist():
                self._mean.setdefault((nodes[a], nodes[b]), float(later[a, b]) / P50_TO_P95_OVER_MEAN)

    def __bool__(self) -> bool:
        return bool(self._mean)

    def mean_s(self, sources: Sequence[DeviceId], targets: Sequence[DeviceId]) -> float:
        """Return the mean delay in seconds of messages that are sent together, on the link where the mean is largest.

        The mean is 0 within a node and for pairs that were not measured.

        Args:
            targets: the target of each source, in the order of `sources`.
        """
        pairs = zip(sources, targets, strict=True)
        return max((self._mean.get((a.node, b.node), 0.0) for a, b in pairs), default=0.0)


def sample_step_times(
    cost: CostModel, layout: Layout, jitter: LinkJitter, draws: int, rng: np.random.Generator, variation: float = 0.0
) -> FloatArray:
    """Return [draw] -> seconds of a simulated step.

    `jitter` delays the messages between stages and the hops of tensor-parallel and data-parallel all-reduces.
    `variation` changes the time of every action. All other times, such as those of ZeRO's collectives, stay as
    predicted.

    Args:
        draws: number of simulated steps.
        variation: coefficient of variation of an action's time (log-normal with the predicted mean).
    """
    step = simulate_step(cost, layout)
    ends: list[FloatArray] = [np.zeros(draws) for _ in range(layout.pp)]
    for replica, (durations, count) in enumerate(zip(step.durations_by_replica, layout.micro_batches, strict=True)):
        program = named_program(layout.schedule, layout.pp, len(layout.blocks), count)
        late, turns = _late_messages(layout, replica, jitter), _late_turns(layout, replica, jitter)
        for rank, values in enumerate(_rank_ends(program, durations, late, turns, _Noise(draws, rng, variation))):
            ends[rank] = np.maximum(ends[rank], values)
    return _after_all_reduce(step, layout, ends, jitter, draws, rng)


def _after_all_reduce(
    step: SimulatedStep,
    layout: Layout,
    ends: list[FloatArray],
    jitter: LinkJitter,
    draws: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Return [draw] -> seconds of the step, including all-reduce and update.

    In a ring of n ranks, each rank sends 2(n − 1) messages one after the other. All ranks send at the same time, and
    the next message waits for the slowest of these n messages.

    Args:
        ends: [pipeline rank] -> [draw] -> seconds until all replicas have ended their actions.
    """
    done: FloatArray = np.zeros(draws)
    for rank in range(layout.pp):
        ring = [row[rank].device_ids for row in layout.placement]
        extra: FloatArray = np.zeros(draws)
        if len(ring) > 1:
            means = [jitter.mean_s(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
            slow = np.array([mean for mean in means if mean > 0])
            turns = 2 * (len(ring) - 1)
            if len(slow):
                extra = rng.exponential(slow, (draws, turns, len(slow))).max(axis=2).sum(axis=1)
        done = np.maximum(done, ends[rank] + step.delays[rank] + step.sums[rank] + extra)
    return done + step.update


def _late_messages(layout: Layout, replica: int, jitter: LinkJitter) -> list[float]:
    """Return the mean extra seconds of a replica's messages, in the order of `StageDurations.by_message`; 0 between
    stages on the same devices.
    """
    hops = list(pairwise(layout.unit(replica, stage) for stage in range(len(layout.blocks))))
    return [
        0.0 if a is b else jitter.mean_s(a.device_ids, b.device_ids) for a, b in [*hops, *((b, a) for a, b in hops)]
    ]


def _late_turns(layout: Layout, replica: int, jitter: LinkJitter) -> list[tuple[int, float]]:
    """Return [stage] -> (number of consecutive messages of its tensor-parallel rings in the forward or the backward
    pass of one micro-batch, mean extra seconds of each message).

    There are two all-reduces for each block and pass (Shoeybi et al. 2019), of 2(tp − 1) consecutive messages each.
    """
    turns_by_stage = []
    for stage, blocks in enumerate(layout.blocks):
        device_ids = layout.unit(replica, stage).device_ids
        means = [jitter.mean_s([a], [b]) for a, b in ring_hops(device_ids)] if len(device_ids) > 1 else []
        late = [mean for mean in means if mean > 0]
        # The maximum of k exponential variables with one mean is on average that mean times 1 + 1/2 + … + 1/k.
        mean_s = max(late, default=0.0) * sum(1 / number for number in range(1, len(late) + 1))
        turns_by_stage.append((2 * blocks * 2 * (len(device_ids) - 1), mean_s))
    return turns_by_stage


def _rank_ends(
    program: ActionProgram,
    durations: StageDurations,
    late: Sequence[float],
    late_turns: Sequence[tuple[int, float]],
    noise: _Noise,
) -> list[FloatArray]:
    """Return [pipeline rank] -> [draw] -> seconds until the rank ends its last action. Actions keep the order of the
    table.

    Args:
        late: mean extra seconds of each message, in the order of `StageDurations.by_message`.
        late_turns: the result of `_late_turns`.
    """
    by_action, by_message, lanes = durations.by_action(), durations.by_message(), durations.lane_of_message()
    latency = durations.latency_of_message()
    free: list[FloatArray] = [np.zeros(noise.draws) for _ in range(program.pipeline_ranks)]
    sent: list[FloatArray] = [np.zeros(noise.draws) for _ in range(max(lanes, default=0) + 1)]
    arrivals: dict[int, FloatArray] = {}
    columns = program.ranks, program.durations, program.needs, program.sends
    for index, (rank, duration, needs, sends) in enumerate(zip(*columns, strict=True)):
        start = free[rank]
        if needs >= 0:
            start = np.maximum(start, arrivals[needs])
        stage, kind = program.stage_and_kind(index)
        turns, mean = (0, 0.0) if kind == "W" else late_turns[stage]
        free[rank] = start + (noise.varied(by_action[duration]) + noise.gamma(turns, mean))
        if sends >= 0:
            arrived = np.maximum(free[rank], sent[lanes[sends]]) + by_message[sends]
            sent[lanes[sends]] = arrived - latency[sends]
            arrivals[index] = arrived + noise.exponential(late[sends])
    return free


class _Noise(NamedTuple):
    """Draws random seconds, one value for each of `draws` simulated steps. `variation` is the standard deviation of an
    action's time, divided by the mean."""

    draws: int
    rng: np.random.Generator
    variation: float

    def exponential(self, mean_s: float) -> FloatArray | float:
        """Return the random extra seconds of a message, [draws]; the number 0 for a mean of 0."""
        return self.rng.exponential(mean_s, self.draws) if mean_s else 0.0

    def gamma(self, turns: int, mean_s: float) -> FloatArray | float:
        """Return [draws]: the sum of the random extra seconds of `turns` messages, sent one after the other. The number
        0 is returned for a mean of 0 or without messages.

        Args:
            mean_s: mean extra seconds of one message.
        """
        return self.rng.gamma(turns, mean_s, self.draws) if turns and mean_s else 0.0

    def varied(self, seconds: float) -> FloatArray | float:
        """Return the random seconds of an action, [draws]: log-normal with mean `seconds`; the number `seconds` if
        times do not vary."""
        sigma = math.sqrt(math.log1p(self.variation * self.variation))
        return seconds * self.rng.lognormal(-sigma * sigma / 2, sigma, self.draws) if sigma else seconds
