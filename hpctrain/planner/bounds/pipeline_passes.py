"""What a micro-batch's way through a pipeline and back takes at least, whichever units do it, wherever they stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import V_SHAPED_SCHEDULES


class PipelinePasses:
    """Of one number of pipeline ranks, schedule and micro-batch size.

    Every part of the model counts as on the unit that is fastest at it, and every hop as within a node but for those
    that must leave one, as there are so many units in the largest nodes.

    Args:
        size: rows of a micro-batch.
    """

    def __init__(
        self, cost: CostModel, unit_counts: UnitCounts, pp: int, schedule_spec: ScheduleSpec, size: int
    ) -> None:
        self.unit_counts, self.pp, self.schedule_spec = unit_counts, pp, schedule_spec
        self._any_s, self._between_s = _hops_s(cost, unit_counts, size)
        one_way = self.hops_s(pp)
        if schedule_spec.virtual_stages > 1:
            # Up again from where it went down, or from the last rank to the first: around a circle of n nodes that is
            # n hops between them.
            wrap = 0.0 if schedule_spec.name in V_SHAPED_SCHEDULES else self.hop_s(unit_counts.least_nodes(pp) > 1)
            one_way = schedule_spec.virtual_stages * one_way + (schedule_spec.virtual_stages - 1) * wrap
        self.one_way_s = one_way
        """Messages of a way through all stages."""
        forward, backward = _whole_s(
            cost, unit_counts, pp * schedule_spec.virtual_stages, schedule_spec.name in SPLIT_BACKWARD_SCHEDULES, size
        )
        self.forward_s = forward + one_way
        """Until it has passed all stages."""
        self.both_s = self.forward_s + backward + one_way
        """Until its gradient has come back to the first stage. Weights' backwards that may wait do not count."""

    def hop_s(self, between: bool) -> float:
        """Seconds of a message to the next stage."""
        return self._between_s if between else self._any_s

    def hops_s(self, ranks: int) -> float:
        """Seconds of the messages of a way through so many neighbouring ranks."""
        crossing = self.unit_counts.least_nodes(ranks) - 1
        return crossing * self.hop_s(True) + (ranks - 1 - crossing) * self._any_s

    def step_s(self, micro_batches: int) -> float:
        """Seconds until a replica is through with so many.

        With 1f1b the first rank keeps `pp` of them at most, so it goes on only when an earlier one is back.
        """
        trips = -(-micro_batches // self.pp) if self.schedule_spec.name == "1f1b" else 1
        return trips * self.both_s


def warmup_forwards(schedule_spec: ScheduleSpec, pp: int) -> NDArray[np.float64]:
    """[rank] -> micro-batches at most, in any of a rank's stages, whose forward may be over while a way through all
    stages is on that the rank's first backward waits for.

    With gpipe it is the last micro-batch's way.
    """
    ranks = np.arange(pp, dtype=np.float64)
    if schedule_spec.name == "gpipe":
        return np.ones(pp)
    if schedule_spec.name in V_SHAPED_SCHEDULES:
        return 2 * pp - 1 - ranks
    return pp - ranks if schedule_spec.virtual_stages == 1 else np.full(pp, 2.0 * pp - 1)


def _hops_s(cost: CostModel, unit_counts: UnitCounts, size: int) -> tuple[float, float]:
    """The least seconds of any message, and of one between two nodes."""
    work = cost.work
    # The search knows one way for all stages, and only what leaves a node travels in it.
    within = work.message_bytes(size, unit_counts.tp, "none")
    between = work.message_bytes(size, unit_counts.tp, work.messages_behind(0))
    crossing_s = (
        unit_counts.alpha + unit_counts.between_beta * (unit_counts.tp if unit_counts.within_nodes else 1) * between
    )
    if not unit_counts.within_nodes:
        return 0.0, crossing_s
    return min(crossing_s, *(alpha + beta * within for alpha, beta in unit_counts.inside)), crossing_s


def _whole_s(cost: CostModel, unit_counts: UnitCounts, stages: int, split: bool, size: int) -> tuple[float, float]:
    """The whole model, forward and backward."""
    layers = cost.work.least_blocks
    timed = [(cost.module_times(unit, size), cost.constants[unit.kind], unit) for unit, _ in unit_counts.kinds]
    action = min(constants.action_ops * unit.launch_s for _, constants, unit in timed)
    forward, backward = (
        layers * min(parts.block[way] + parts.block_tp[way] for parts, _, _ in timed)
        + min(parts.embedding[way] for parts, _, _ in timed)
        + stages * action
        for way in (0, 1)
    )
    head, head_back = (min(parts.head[way] for parts, _, _ in timed) for way in (0, 1))
    if split and stages > 1:
        # All stages but the first send gradients on before they come to their weights.
        backs = [(parts.block[1] + parts.block_tp[1], parts, constants.inputs_share) for parts, constants, _ in timed]
        block = min(min(whole, share * (whole + parts.block_split)) for whole, parts, share in backs)
        share = min(share for _, _, share in backs)
        embedding = min(parts.embedding[1] for parts, _, _ in timed)
        return forward + head, layers * block + embedding + share * head_back + action * (1 + 2 * share * (stages - 1))
    return forward + head, backward + head_back
