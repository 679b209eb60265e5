"""When the gradients of stages are summed over the replicas in a simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpctrain.planner.cost.collectives import begins_early, overlapped_copies_share
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.shard_collectives import ShardCollectiveTimes
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.card_sharing import CardSharing, SumWindow
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES


class StageSum(NamedTuple):
    """The all-reduce of a stage's gradients over the replicas."""

    wire_s: float
    """Seconds of the messages that may pass while the rank goes on with other stages."""
    hidden_s: float
    """Seconds of these messages that may pass during the stage's last backward."""
    late_s: float
    """Seconds of all else, which comes after the rank's last backward."""

    def begun_late(self) -> StageSum:
        """Return the same all-reduce with all its messages after the rank's last backward."""
        return StageSum(0.0, 0.0, self.wire_s + self.late_s)


class RankSum(NamedTuple):
    """When the all-reduces of a pipeline rank's gradients pass, in seconds from the start of the step."""

    messages: tuple[SumWindow, ...]
    """When messages pass that need not wait for the rank's last backward, by stage; empty if all wait for it."""
    start_s: float
    """When the first messages begin."""
    end_s: float
    """When all gradients are summed."""


class StepSums(NamedTuple):
    """The all-reduces over the replicas in a step, and the ends of stages, which they may delay."""

    ranks: list[RankSum]
    """[pipeline rank] -> its all-reduces."""
    ends: Sequence[Sequence[float]]
    """By replica, [stage] -> seconds from the start of the step until the stage's last backward ends."""
    share_cards: bool = False
    """Whether stage messages may be delayed."""
    are_late: bool = False
    """Whether all messages wait for the ranks' last backwards, because the step is then shorter."""

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step until all gradients are summed."""
        return max(rank.end_s for rank in self.ranks)


def shard_collective_seconds(cost: CostModel, layout: Layout) -> list[ShardCollectiveTimes]:
    """Return [stage] -> seconds of its ZeRO collectives; 0 without sharding."""
    if layout.shards == 1:
        return [ShardCollectiveTimes(0.0, 0.0, 0.0)] * len(layout.blocks)
    placement, work = layout.placement, cost.work
    links = cost.placement_links(placement)
    times = cost.shard_collectives.times(links, layout.model_parts, layout.rank_of_stage, layout.shards)
    if layout.shards < layout.dp and (not work.codec.exact or _kind(layout) == "cpu"):
        sums = cost.all_reduce_times(placement, layout.model_parts, layout.rank_of_stage, layout.shards)
        early = [overlapped_copies_share(work, _kind(layout), stage.pieces) > 0 for stage in times]
        return [
            stage._replace(copies=copies.seconds, early_copies_s=copies.beside_s if begins else 0.0)
            for stage, copies, begins in zip(times, sums, early, strict=True)
        ]
    if work.codec.reduce_scatter_share:
        numbers = [work.parameters(share, layout.tp) for share in layout.model_parts]
        return [
            stage._replace(scatter=stage.scatter + count * cost.gradient_cast_s(placement, rank))
            for stage, count, rank in zip(times, numbers, layout.rank_of_stage, strict=True)
        ]
    return times


def stage_sums(cost: CostModel, layout: Layout, sharded: list[ShardCollectiveTimes]) -> list[StageSum]:
    """Return [stage] -> the all-reduce of its gradients over the replicas. Those of a tied embedding over the ranks
    that hold it are added to the first and the last stage.

    Args:
        sharded: [stage] -> seconds of its ZeRO collectives.
    """
    ends = (layout.rank_of_stage[0], layout.rank_of_stage[-1])
    tied = cost.tied_all_reduce_s(layout.placement, *ends)
    if layout.shards == 1:
        sums = cost.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage)
        if begins_early(cost.work, len(layout.blocks)):
            by_stage = [
                StageSum(
                    time.beside_s, overlapped_s(cost, layout, time.beside_s, stage), time.sending_s + time.processor_s
                )
                for stage, time in enumerate(sums)
            ]
        else:
            by_stage = [StageSum(0.0, 0.0, time.seconds) for time in sums]
    else:
        by_stage = [
            StageSum(
                times.early_copies_s,
                overlapped_s(cost, layout, times.early_copies_s, stage),
                times.per_step(layout.memory_options.zero),
            )
            for stage, times in enumerate(sharded)
        ]
    for stage in {layout.rank_of_stage.index(rank) for rank in ends}:
        by_stage[stage] = by_stage[stage]._replace(late_s=by_stage[stage].late_s + tied)
    return by_stage


def settle_sums(
    cost: CostModel,
    layout: Layout,
    sums: Sequence[StageSum],
    ends: Sequence[Sequence[float]],
    replicas: Sequence[int],
    delayed_ends: Callable[[int, CardSharing], Sequence[float]],
    limit_s: float = math.inf,
) -> StepSums:
    """Return the all-reduces of a step as workers make them: those that begin while the pipeline goes on, with the
    stage messages that they delay, or all of them after a rank's last backward, if the step is then shorter.

    Args:
        sums: [stage] -> its all-reduce, which may begin early.
        ends: by replica, [stage] -> seconds from the start of the step until the stage's last backward ends, if sums
            delay nothing.
        replicas: numbers of these replicas.
        delayed_ends: returns the ends of a replica, given by its place in `ends`, while messages share cards with sums.
        limit_s: seconds from the start of the step. If gradients cannot be summed by then, the result leaves out what
            the sums delay.
    """
    early = StepSums(rank_sums(layout, sums, ends), ends)
    if layout.pp == 1:
        return early
    late = StepSums(rank_sums(layout, [stage.begun_late() for stage in sums], ends), ends, are_late=True)
    if early.end_s >= late.end_s:
        return late
    if early.end_s >= limit_s:
        return early
    early = sums_beside_messages(cost, layout, sums, ends, replicas, delayed_ends)
    return early if early.end_s < late.end_s else late


def sums_beside_messages(
    cost: CostModel,
    layout: Layout,
    sums: Sequence[StageSum],
    ends: Sequence[Sequence[float]],
    replicas: Sequence[int],
    delayed_ends: Callable[[int, CardSharing], Sequence[float]],
) -> StepSums:
    """Return the all-reduces of a step that begin while the pipeline goes on. Messages and sums that pass a card
    together share its rate, and the sums end later by what the messages take. Arguments as in `settle_sums`."""
    windows, links = [rank.messages for rank in rank_sums(layout, sums, ends)], cost.placement_links(layout.placement)
    sharing = [
        CardSharing(links, replica, layout.rank_of_stage, windows, links.lanes(replica, layout.rank_of_stage))
        for replica in replicas
    ]
    delayed = [delayed_ends(number, cards) for number, cards in enumerate(sharing)]
    carried = [max(cards.carried_s(rank) for cards in sharing) for rank in range(layout.pp)]
    return StepSums(rank_sums(layout, sums, delayed, carried), delayed, share_cards=True)


def rank_sums(
    layout: Layout, sums: Sequence[StageSum], ends: Sequence[Sequence[float]], carried: Sequence[float] = ()
) -> list[RankSum]:
    """Return [pipeline rank] -> when its gradients are summed over the replicas. The messages of a stage begin when all
    replicas have done its last backward, or earlier by the seconds of messages that pass during this backward
    (`StageSum.hidden_s`). They do not begin before those of the rank's earlier stage, in order of these ends, are over.

    Args:
        sums: [stage] -> its all-reduce.
        ends: by replica, [stage] -> seconds from the start of the step until the stage's last backward ends.
        carried: [pipeline rank] -> seconds that its sums lose to stage messages on the same cards; empty: none.
    """
    done = [max(seconds) for seconds in zip(*ends, strict=True)]
    ranks = []
    for rank, held in enumerate(layout.stages_by_rank):
        windows: list[SumWindow] = []
        last = wire_end = max(done[stage] for stage in held)
        for stage in sorted((stage for stage in held if sums[stage].wire_s > 0), key=done.__getitem__):
            start = max(windows[-1].end_s if windows else 0.0, done[stage] - sums[stage].hidden_s)
            windows.append(SumWindow(start, start + sums[stage].wire_s))
        if windows:
            wire_end = windows[-1].end_s + (carried[rank] if carried else 0.0)
            windows[-1] = windows[-1]._replace(end_s=wire_end)
        end = max(wire_end, last) + sum(sums[stage].late_s for stage in held)
        ranks.append(RankSum(tuple(windows), windows[0].start_s if windows else last, end))
    return ranks


def after_rank_s(stages: Sequence[StageSum]) -> float:
    """Return the least seconds of a pipeline rank's all-reduces after its last backward, in any order of actions.

    Args:
        stages: the all-reduces of its stages.
    """
    wires = stages[0].wire_s - stages[0].hidden_s if len(stages) == 1 else 0.0
    return wires + sum(stage.late_s for stage in stages)


def overlapped_s(cost: CostModel, layout: Layout, wire_s: float, stage: int = 0) -> float:
    """Return the seconds of an all-reduce's messages that pass during the stage's backward of a replica's last
    micro-batch; 0 where no share of them does, and for a backward that is split.

    Args:
        wire_s: seconds of the all-reduce's messages.
    """
    part = layout.model_parts[stage]
    if layout.shards > 1:
        share = overlapped_copies_share(cost.work, _kind(layout), part.pieces)
    else:
        share = cost.overlapped_share(len(layout.blocks), layout.tp, part)
    # Of a schedule with split backwards, only the first stage has whole ones.
    if share == 0.0 or (stage and layout.schedule in SPLIT_BACKWARD_SCHEDULES):
        return 0.0
    backward = (
        cost.stage(layout.unit(replica, stage), layout.micro_batch, layout.model_parts[stage]).backward
        for replica in layout.placement.representatives
    )
    return min(wire_s * share, *backward)


def _kind(layout: Layout) -> str:
    """Return the kind of the devices: cuda or cpu."""
    return layout.placement[0][0].kind
