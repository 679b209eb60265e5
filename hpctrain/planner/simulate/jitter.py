"""Simulation of a step with noise; every array holds one value for each draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.links import node_of, ring_hops
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.engine import StageDurations
from hpctrain.planner.simulate.predict import SimulatedStep, simulate_step
from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.records.topology.topology import Topology
from hpctrain.schedule.generate import make_schedule

FloatArray = NDArray[np.float64]

P95_OVER_MEAN = math.log(20)
"""95th percentile of an exponential distribution, divided by its mean."""
P50_TO_P95_OVER_MEAN = P95_OVER_MEAN - math.log(2)
"""Difference between its p95 and p50, divided by its mean."""


class LinkJitter:
    """The delay of messages beyond their median: exponential, fitted to the probe's p50 and p95."""

    def __init__(self, topology: Topology) -> None:
        self._mean: dict[tuple[str, str], float] = {}
        for link in topology.fabric.links:
            for ends, figures in (((link.a, link.b), link.ab), ((link.b, link.a), link.ba)):
                if figures.latency_s is not None and figures.latency_s.p95 > figures.latency_s.p50:
                    self._mean[ends] = (figures.latency_s.p95 - figures.latency_s.p50) / P50_TO_P95_OVER_MEAN
        if topology.pairs is not None:
            # Large clusters have their figures in a matrix, with NaN for pairs that were not measured.
            later = topology.pairs["latency_p95_s"] - topology.pairs["latency_p50_s"]
            nodes = topology.pairs.nodes
            for a, b in np.argwhere(later > 0).tolist():
                self._mean.setdefault((nodes[a], nodes[b]), float(later[a, b]) / P50_TO_P95_OVER_MEAN)

    def __bool__(self) -> bool:
        return bool(self._mean)

    def mean_s(self, sources: Sequence[str], targets: Sequence[str]) -> float:
        """Mean extra seconds of messages that are sent together; 0 within a node and for pairs not measured."""
        pairs = zip(sources, targets, strict=True)
        return max((self._mean.get((node_of(a), node_of(b)), 0.0) for a, b in pairs), default=0.0)


class ReplicaJitter(NamedTuple):
    """The mean delays in a replica's step."""

    messages: Mapping[tuple[int, int], float]
    """(from stage, to stage) -> mean extra seconds of a message."""
    turns: Sequence[tuple[int, float]]
    """[stage] -> (turns of its tensor-parallel rings in a forward or backward, mean extra seconds of a turn)."""


def sample_step_times(
    cost: CostModel, layout: Layout, jitter: LinkJitter, draws: int, rng: np.random.Generator, variation: float = 0.0
) -> FloatArray:
    """Return the seconds of a step in each draw.

    `jitter` delays the messages between stages and the hops of tensor-parallel and data-parallel all-reduces.
    `variation` changes the time of every action. The rest, such as ZeRO's collectives within a micro-batch, stays as
    predicted.

    Args:
        variation: coefficient of variation of an action's time (log-normal, mean 1).
    """
    step = simulate_step(cost, layout)
    ends: list[FloatArray] = [np.zeros(draws) for _ in range(layout.pp)]
    for replica, (durations, count) in enumerate(zip(step.durations_by_replica, layout.micro_batches, strict=True)):
        table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), count)
        late = ReplicaJitter(_late_messages(layout, replica, jitter), _late_turns(layout, replica, jitter))
        for rank, values in enumerate(_rank_ends(table, durations, late, draws, rng, variation)):
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
    """Seconds of the step in each draw; a ring of n waits in each of its 2(n − 1) turns for the latest hop."""
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
        done = np.maximum(done, ends[rank] + step.sums[rank] + extra)
    return done + step.update


def _late_messages(layout: Layout, replica: int, jitter: LinkJitter) -> dict[tuple[int, int], float]:
    found = {}
    for stage in range(len(layout.blocks) - 1):
        a, b = layout.unit(replica, stage), layout.unit(replica, stage + 1)
        if a is not b:
            found[stage, stage + 1] = jitter.mean_s(a.device_ids, b.device_ids)
            found[stage + 1, stage] = jitter.mean_s(b.device_ids, a.device_ids)
    return found


def _late_turns(layout: Layout, replica: int, jitter: LinkJitter) -> list[tuple[int, float]]:
    """`ReplicaJitter.turns`: two all-reduces for each block and pass (Shoeybi et al. 2019), of 2(tp − 1) turns each."""
    found = []
    for stage, blocks in enumerate(layout.blocks):
        device_ids = layout.unit(replica, stage).device_ids
        means = [jitter.mean_s([a], [b]) for a, b in ring_hops(device_ids)] if len(device_ids) > 1 else []
        late = [mean for mean in means if mean > 0]
        # The maximum of k exponentials with one mean is on average that mean times 1 + 1/2 + … + 1/k.
        each = max(late, default=0.0) * sum(1 / number for number in range(1, len(late) + 1))
        found.append((2 * blocks * 2 * (len(device_ids) - 1), each))
    return found


def _rank_ends(
    table: Schedule, durations: StageDurations, late: ReplicaJitter, draws: int, rng: np.random.Generator,
    variation: float,
) -> list[FloatArray]:  # fmt: skip
    """When each pipeline rank ends its last action, in seconds for every draw; actions keep the table's order."""
    sigma = math.sqrt(math.log1p(variation * variation))
    done: dict[tuple[int, str, int], FloatArray] = {}
    free: list[FloatArray] = [np.zeros(draws) for _ in table.ranks]
    position = [0] * len(table.ranks)
    left = sum(len(row) for row in table.ranks)
    while left:
        before = left
        for rank, row in enumerate(table.ranks):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = _arrival(action, durations, late.messages, done, draws, rng)
                if ready is None:
                    break
                seconds: FloatArray | float = _seconds(action, durations)
                if sigma:
                    seconds = seconds * rng.lognormal(-sigma * sigma / 2, sigma, draws)
                turns, mean = late.turns[action.stage]
                if turns and mean and action.kind != "W":
                    seconds = seconds + rng.gamma(turns, mean, draws)
                free[rank] = np.maximum(free[rank], ready) + seconds
                done[action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch] = free[rank]
                position[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the action table cannot be executed: every pipeline rank waits for another")
    return free


def _arrival(
    action: Action, durations: StageDurations, late: Mapping[tuple[int, int], float],
    done: Mapping[tuple[int, str, int], FloatArray], draws: int, rng: np.random.Generator,
) -> FloatArray | None:  # fmt: skip
    """When the action's inputs have arrived, in seconds for every draw; None while that is not known."""
    stage, kind, micro_batch = action
    own = None
    if kind != "F":
        own = done.get((stage, "B" if kind == "W" else "F", micro_batch))
        if own is None or kind == "W" or stage == len(durations.forward) - 1:
            return own
    elif stage == 0:
        return np.zeros(draws)
    source = stage - 1 if kind == "F" else stage + 1
    sent = done.get((source, "F" if kind == "F" else "B", micro_batch))
    if sent is None:
        return None
    took = durations.send[stage - 1] if kind == "F" else durations.send_back[stage]
    mean = late.get((source, stage), 0.0)
    arrived = sent + took + (rng.exponential(mean, draws) if mean else 0.0)
    return arrived if own is None else np.maximum(own, arrived)


def _seconds(action: Action, durations: StageDurations) -> float:
    by_kind = {"F": durations.forward, "B": durations.backward, "I": durations.inputs, "W": durations.weights}
    return by_kind[action.kind][action.stage]
