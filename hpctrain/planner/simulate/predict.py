"""Predicts the terms of a layout's step time by simulating its action table, and computes a lower bound of the step
time without simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.devices.tensor_parallel_group import class_numbers
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.card_sharing import CardSharing
from hpctrain.planner.simulate.durations import (
    ReplicaRun,
    collectives_s,
    lane_seconds,
    replica_durations,
    replica_kinds,
    replica_runs,
    stage_times,
)
from hpctrain.planner.simulate.engine import StageDurations, Timeline, delayed_stage_ends, simulate, stage_ends
from hpctrain.planner.simulate.gradient_sums import (
    StageSum,
    after_rank_s,
    rank_sums,
    settle_sums,
    shard_collective_seconds,
    stage_sums,
)
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES, make_schedule

STEP_TIME_TERMS = ("compute", "pipeline_bubble", "pipeline_send", "tensor_parallel", "data_parallel", "optimizer")
"""Terms of a step's time; they add up to 'total'."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A layout and its predicted step time."""

    layout: Layout
    total: float
    """Seconds of the step."""
    late_sums: bool
    """Whether workers begin all sums of gradients after the pipeline, because steps are then shorter."""
    slowest: int
    """The replica for which the all-reduce that ends last waits."""
    times: LayoutTimes
    """The durations of the layout, and of layouts that differ from it only in their numbers of micro-batches."""
    find_terms: Callable[[], dict[str, float]]
    """Computes `terms`; a search needs those of few predictions."""

    @cached_property
    def terms(self) -> dict[str, float]:
        """Term of `STEP_TIME_TERMS` -> seconds; 'total' is the sum of all of them."""
        return self.find_terms() | {"total": self.total}


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step simulated action by action, with a timeline for each replica, and with the all-reduces of gradients and
    the optimizer's update."""

    durations_by_replica: list[StageDurations]
    lines: list[Timeline]
    """[replica] -> timeline."""
    sums: list[float]
    """[pipeline rank] -> seconds from the rank's last backward in any replica until its gradients are all-reduced. They
    include the wait for network cards that replicas share between different stages, which no timeline shows."""
    sum_starts: list[float]
    """[pipeline rank] -> seconds from the start of the step until the all-reduce of the rank's first gradients begins,
    which may be before the rank's last backward."""
    delays: list[float]
    """[pipeline rank] -> seconds by which the rank's last action ends later because stage messages share cards with
    all-reduces."""
    update: float
    """Seconds of the gradient norm and the optimizer after all all-reduces."""

    @property
    def last(self) -> int:
        """Index of the replica whose pipeline ends last."""
        return max(range(len(self.lines)), key=lambda replica: self.lines[replica].makespan)

    @property
    def early_sums_s(self) -> float:
        """Seconds by which the all-reduces of the pipeline rank whose all-reduces end last begin before its last
        backward ends."""
        rank = max(range(len(self.sums)), key=self.all_reduced_at)
        return max(0.0, max(line.rank_end(rank) for line in self.lines) - self.sum_starts[rank])

    def all_reduced_at(self, rank: int) -> float:
        """Return the seconds from the start of the step until the all-reduce of a pipeline rank ends."""
        return max(line.rank_end(rank) for line in self.lines) + self.sums[rank]


def simulate_step(cost: CostModel, layout: Layout) -> SimulatedStep:
    """Return the simulated step of a layout: every replica's action table, the all-reduces over replicas, which may
    begin before the tables end, and the update.
    """
    sharded = shard_collective_seconds(cost, layout)
    runs = replica_runs(cost, layout, sharded)
    tables = [make_schedule(layout.schedule, layout.pp, len(layout.blocks), run.micro_batches) for run in runs]
    alone = [simulate(table, run.durations) for table, run in zip(tables, runs, strict=True)]
    beside: list[Timeline] = []

    def delayed_ends(number: int, sharing: CardSharing) -> tuple[float, ...]:
        beside.append(simulate(tables[number], runs[number].durations, sharing))
        return beside[-1].stage_ends()

    sums, ends_alone = stage_sums(cost, layout, sharded), [line.stage_ends() for line in alone]
    summed = settle_sums(cost, layout, sums, ends_alone, [run.replica for run in runs], delayed_ends)
    lines = beside if summed.share_cards else alone
    wait = max(0.0, _busiest_port_s(cost, layout) - max(line.makespan for line in lines))
    ends = [max(line.rank_end(rank) for line in lines) for rank in range(layout.pp)]
    kinds = class_numbers(replica_kinds(cost, layout))
    places = [number if len(runs) > 1 else 0 for number in kinds]
    return SimulatedStep(
        [runs[place].durations for place in places],
        [lines[place] for place in places],
        [wait + by_rank.end_s - end for by_rank, end in zip(summed.ranks, ends, strict=True)],
        [wait + by_rank.start_s for by_rank in summed.ranks],
        [end - max(line.rank_end(rank) for line in alone) for rank, end in enumerate(ends)],
        _update(cost, layout),
    )


class LayoutTimes:
    """The durations of a layout, except those that depend on the numbers of micro-batches of its replicas."""

    def __init__(self, cost: CostModel, layout: Layout) -> None:
        self._cost, self._layout = cost, layout
        self.sharded = shard_collective_seconds(cost, layout)
        self.sums = stage_sums(cost, layout, self.sharded)
        self.update_s = _update(cost, layout)
        self.by_replica: dict[int, StageDurations] = {}
        """Replica -> its durations, if they were computed already."""

    def hold_for(self, cost: CostModel, layout: Layout) -> bool:
        """Return whether these are the durations of a layout."""
        same, fields = self._layout, ("schedule", "micro_batch", "blocks", "memory_options")
        if cost is not self._cost or layout.placement is not same.placement:
            return False
        return all(getattr(layout, name) == getattr(same, name) for name in fields)


class TimedLayout:
    """A layout with the durations of its actions, messages and sums, from which its step is predicted and bounded.

    Args:
        cost: cost model with the memory options of the layout.
        known: durations of a similar layout, used if they are those of this layout too; None: there are none.
    """

    def __init__(self, cost: CostModel, layout: Layout, known: LayoutTimes | None = None) -> None:
        self.cost, self.layout = cost, layout
        self._times = known if known is not None and known.hold_for(cost, layout) else LayoutTimes(cost, layout)
        self._sharded, self._sums, self._update_s = self._times.sharded, self._times.sums, self._times.update_s
        self._port_s = _busiest_port_s(cost, layout)

    @cached_property
    def _runs(self) -> list[ReplicaRun]:
        return replica_runs(self.cost, self.layout, self._sharded, self._times.by_replica)

    @cached_property
    def _busy(self) -> list[list[float]]:
        """[run, in the order of `_runs`][pipeline rank] -> the seconds of a step in which the rank runs its actions."""
        return [run.busy_s(self.layout) for run in self._runs]

    @cached_property
    def bound_s(self) -> float:
        """A lower bound in seconds of the step time, for any action table. It counts each rank's work and its messages
        to other nodes, what must come before its first forward and after its last backward, the all-reduce over
        replicas and the update.
        """
        bound = self._port_s
        for run, busy in zip(self._runs, self._busy, strict=True):
            around = _around_ranks_s(self.layout, run.durations, self._sums, busy)
            bound = max(bound, *map(sum, zip(around, busy, strict=True)))
            bound = max(bound, run.micro_batches * max(lane_seconds(run.durations), default=0.0))
        return bound + self._update_s

    def predict(self, whole: bool = False) -> Prediction:
        """Return what the function `predict` returns."""
        prediction = self._predict(whole, inf)
        assert prediction is not None, "every step is shorter than infinity"
        return prediction

    def predict_below(self, limit_s: float, slowest: int | None = None) -> Prediction | None:
        """Return the prediction if the step is shorter than `limit_s` seconds. None if it is not; this is often known
        before the step is simulated to its end.

        Args:
            slowest: a replica that alone may take as long as `limit_s`. It is simulated before all else is computed.
        """
        if slowest is not None and self._takes(slowest, limit_s):
            return None
        prediction = self._predict(False, limit_s) if self.bound_s < limit_s else None
        return prediction if prediction is not None and prediction.total < limit_s else None

    def _takes(self, replica: int, limit_s: float) -> bool:
        """Return whether a step takes at least `limit_s` seconds because of one replica and its all-reduces."""
        layout = self.layout
        if layout.memory_options.equal_micro_batches:
            return False  # only all replicas together say how long one takes
        durations = replica_durations(self.cost, layout, replica, self._sharded, self._times.by_replica)
        run = ReplicaRun(replica, layout.micro_batches[replica], durations)
        ends = _stage_ends(layout, run, whole=False)
        return max(rank.end_s for rank in rank_sums(layout, self._sums, [ends])) + self._update_s >= limit_s

    def _predict(self, whole: bool, limit_s: float) -> Prediction | None:
        """Return the prediction; None where it is seen on the way that the step is not shorter than `limit_s`."""
        cost, layout, runs = self.cost, self.layout, self._runs
        limit_s -= self._update_s
        alone: list[tuple[float, ...]] = [()] * len(runs)
        # The busiest replica comes first, because it is the likeliest to reach the limit.
        for number in sorted(range(len(runs)), key=lambda number: -max(self._busy[number])):
            alone[number] = _stage_ends(layout, runs[number], whole)
            if max(alone[number]) >= limit_s:
                return None

        def delayed_ends(number: int, sharing: CardSharing) -> tuple[float, ...]:
            degrees = layout.pp, len(layout.blocks), runs[number].micro_batches
            return delayed_stage_ends(layout.schedule, *degrees, runs[number].durations, alone[number], sharing, whole)

        replicas = [run.replica for run in runs]
        summed = settle_sums(cost, layout, self._sums, alone, replicas, delayed_ends, limit_s)
        number = max(range(len(runs)), key=lambda number: max(summed.ends[number]))
        unhindered = max(summed.ends[number])
        wait = max(0.0, self._port_s - unhindered)
        done, pipeline = wait + summed.end_s, wait + unhindered
        if done >= limit_s:
            return None
        last = layout.stages_by_rank[max(range(layout.pp), key=lambda rank: summed.ranks[rank].end_s)]
        slowest = max(range(len(runs)), key=lambda number: max(summed.ends[number][stage] for stage in last))
        return Prediction(
            layout,
            done + self._update_s,
            summed.are_late,
            replicas[slowest],
            self._times,
            lambda: self._terms(number, pipeline, done, whole),
        )

    def _terms(self, number: int, pipeline: float, done: float, whole: bool) -> dict[str, float]:
        """Return term -> seconds.

        Args:
            number: number of the run, in the order of `self._runs`, that ends last.
            pipeline: seconds from the start of the step until its pipeline ends.
            done: seconds from the start of the step until all gradients are summed.
            whole: as in `predict`.
        """
        cost, layout, last = self.cost, self.layout, self._runs[number]
        without_sends = pipeline
        if layout.pp > 1:
            without_sends = max(_stage_ends(layout, last._replace(durations=last.durations.without_sends()), whole))
        busy, busiest = max((seconds, -rank) for rank, seconds in enumerate(self._busy[number]))
        # Where a long table is extrapolated, these may exceed the pipeline's time by a little.
        busy, without_sends = min(busy, pipeline), min(without_sends, pipeline)
        times, stages = stage_times(cost, layout, last.replica), layout.stages_by_rank[-busiest]
        shared = last.micro_batches * sum(times[stage].tensor_parallel for stage in stages)
        sharding = last.micro_batches * sum(
            collectives_s(cost, layout, self._sharded[stage], times[stage]) for stage in stages
        )
        return {
            "compute": busy - shared - sharding,
            "pipeline_bubble": max(0.0, without_sends - busy),
            "pipeline_send": pipeline - max(without_sends, busy),
            "tensor_parallel": shared,
            "data_parallel": done - pipeline + sharding,
            "optimizer": self._update_s,
        }


def predict(cost: CostModel, layout: Layout, whole: bool = False) -> Prediction:
    """Return the predicted step time: every replica's action table, the all-reduces over replicas, which may begin
    before the tables end, and the update.

    The result's `terms` describe the replica that ends last. `compute` is the computation of its busiest pipeline
    rank; the other terms are what the step takes beyond that.

    Args:
        whole: simulate long tables to their end (see `stage_ends`).
    """
    return TimedLayout(cost, layout).predict(whole)


def largest_increase(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the term that grew the most, with its value before and after, as text.

    Args:
        before: term -> seconds, as in `Prediction.terms`.
        after: term -> seconds.
    """
    term = max(STEP_TIME_TERMS, key=lambda name: after[name] - before[name])
    return f"{term} is {format_seconds(after[term])} instead of {format_seconds(before[term])}"


def _stage_ends(layout: Layout, run: ReplicaRun, whole: bool) -> tuple[float, ...]:
    return stage_ends(layout.schedule, layout.pp, len(layout.blocks), run.micro_batches, run.durations, whole)


def least_around_ranks_s(cost: CostModel, layout: Layout) -> list[float]:
    """Return [pipeline rank] -> the least seconds of a step before the first action of the rank and after its last one,
    in any replica. They are a lower bound also for layouts on the same devices with more blocks in some stages.
    """
    sharded = shard_collective_seconds(cost, layout)
    sums, update = stage_sums(cost, layout, sharded), _update(cost, layout)
    # Other layouts may hide more of a rank's messages behind its computation.
    busy = [float("inf")] * layout.pp
    around = (_around_ranks_s(layout, run.durations, sums, busy) for run in replica_runs(cost, layout, sharded))
    return [min(seconds) + update for seconds in zip(*around, strict=True)]


def _around_ranks_s(layout: Layout, durations: StageDurations, sums: list[StageSum], busy: list[float]) -> list[float]:
    """Return [pipeline rank] -> lower bound in seconds of what comes before its first forward and after its last
    backward, except the update.

    Args:
        sums: [stage] -> its all-reduce.
        busy: [pipeline rank] -> the seconds that its actions take in a step.
    """
    pp, split = layout.pp, layout.schedule in SPLIT_BACKWARD_SCHEDULES
    way_in = [0.0, *accumulate(durations.forward[s] + durations.send[s] for s in range(pp - 1))]
    way_out = [0.0, *accumulate(durations.backward[s] + durations.send_back[s] for s in range(pp - 1))]
    held = [[sums[stage] for stage in stages] for stages in layout.stages_by_rank]
    after = [after_rank_s(stages) for stages in held]
    # The messages of a rank's stages may pass while the rank computes, but they take their time.
    own = [
        max(after[rank], sum(stage.wire_s + stage.late_s for stage in stages) - busy[rank])
        if len(stages) > 1 else after[rank]
        for rank, stages in enumerate(held)
    ]  # fmt: skip
    # With split backwards, a rank's last action may be a W, which no other rank waits for.
    return [way_in[rank] + (own[rank] if split else max(own[rank], way_out[rank] + after[0])) for rank in range(pp)]


def _busiest_port_s(cost: CostModel, layout: Layout) -> float:
    """Return the seconds in which the busiest network card or uplink carries all stage messages of a step in one
    direction. Replicas count as having as few micro-batches as any of them.

    Messages of different stages overlap in time only by chance, so they are not slowed down by each other. But no step
    is shorter than this.
    """
    if layout.pp == 1:
        return 0.0
    beta = cost.placement_links(layout.placement).busiest_port_beta(layout.rank_of_stage)
    codecs = {cost.work.messages_behind(stage) for stage in range(len(layout.blocks) - 1)}
    size = min(cost.work.message_bytes(layout.micro_batch, layout.tp, codec) for codec in codecs)
    return min(layout.micro_batches) * beta * size


def _update(cost: CostModel, layout: Layout) -> float:
    """Return the seconds of the all-reduce of the gradient norm, plus those of the optimizer's update on the slowest
    device.
    """
    slowest = 0.0
    for replica in layout.placement.representatives:
        for unit, stages in zip(layout.placement[replica], layout.stages_by_rank, strict=True):
            update = sum(cost.optimizer_s(unit, layout.model_parts[stage], layout.shards) for stage in stages)
            slowest = max(slowest, cost.step_overhead_s(unit) + update)
    return cost.norm_all_reduce_s(layout.placement) + slowest
