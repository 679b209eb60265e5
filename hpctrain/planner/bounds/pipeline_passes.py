"""Lower bounds of a micro-batch's pass through a pipeline and back, on any units (tensor-parallel groups)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import ScheduleSpec
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.placement import V_SHAPED_SCHEDULES


class PipelinePasses:
    """Bounds for one number of pipeline ranks, schedule and micro-batch size.

    Every part of the model counts as on the unit that is fastest at it. Hops count as within a node, except for those
    that must leave one because the largest nodes have no more units.

    Args:
        size: sequences of a micro-batch.
    """

    def __init__(
        self, cost: CostModel, unit_counts: UnitCounts, pp: int, schedule_spec: ScheduleSpec, size: int
    ) -> None:
        self.unit_counts, self.pp, self.schedule_spec = unit_counts, pp, schedule_spec
        self._any_s, self._between_s = _hops_s(cost, unit_counts, size)
        one_way = self.hops_s(pp)
        if schedule_spec.virtual_stages > 1:
            # A V goes back from the last rank; other schedules wrap from the last rank to the first. A circle through n
            # nodes crosses between them n times.
            wrap = 0.0 if schedule_spec.name in V_SHAPED_SCHEDULES else self.hop_s(unit_counts.least_nodes(pp) > 1)
            one_way = schedule_spec.virtual_stages * one_way + (schedule_spec.virtual_stages - 1) * wrap
        self.one_way_s = one_way
        """Seconds of the messages of a forward pass through all stages."""
        forward, backward = _whole_s(
            cost, unit_counts, pp * schedule_spec.virtual_stages, schedule_spec.name in SPLIT_BACKWARD_SCHEDULES, size
        )
        self.forward_s = forward + one_way
        """Seconds until a micro-batch has passed all stages forward."""
        self.both_s = self.forward_s + backward + one_way
        """Seconds until its gradient is back at the first stage; W does not count with split backwards."""

    def hop_s(self, between: bool) -> float:
        """Seconds of a message to the next stage."""
        return self._between_s if between else self._any_s

    def hops_s(self, ranks: int) -> float:
        """Seconds of the messages of a pass through `ranks` neighbouring ranks."""
        crossing = self.unit_counts.least_nodes(ranks) - 1
        return crossing * self.hop_s(True) + (ranks - 1 - crossing) * self._any_s

    def step_s(self, micro_batches: int) -> float:
        """Seconds until a replica has done `micro_batches` micro-batches.

        With 1f1b the first rank holds at most `pp` of them, so it starts another only when an earlier one is back.
        """
        trips = -(-micro_batches // self.pp) if self.schedule_spec.name == "1f1b" else 1
        return trips * self.both_s


def warmup_forwards(schedule_spec: ScheduleSpec, pp: int) -> NDArray[np.float64]:
    """[rank] -> the most forwards that the rank can do during the forward pass that its first backward waits for.

    Forwards of all its stages count. With gpipe it is the pass of the last micro-batch.
    """
    ranks = np.arange(pp, dtype=np.float64)
    if schedule_spec.name == "gpipe":
        return np.ones(pp)
    if schedule_spec.name in V_SHAPED_SCHEDULES:
        return 2 * pp - 1 - ranks
    return pp - ranks if schedule_spec.virtual_stages == 1 else np.full(pp, 2.0 * pp - 1)


def _hops_s(cost: CostModel, unit_counts: UnitCounts, size: int) -> tuple[float, float]:
    """The least seconds of any message between stages, and of one that leaves a node."""
    work = cost.work
    # During the search all stages have one message codec, which is used only between nodes.
    within = work.message_bytes(size, unit_counts.tp, "none")
    between = work.message_bytes(size, unit_counts.tp, work.messages_behind(0))
    crossing_s = (
        unit_counts.alpha + unit_counts.between_beta * (unit_counts.tp if unit_counts.within_nodes else 1) * between
    )
    if not unit_counts.within_nodes:
        return 0.0, crossing_s
    return min(crossing_s, *(alpha + beta * within for alpha, beta in unit_counts.inside)), crossing_s


def _whole_s(cost: CostModel, unit_counts: UnitCounts, stages: int, split: bool, size: int) -> tuple[float, float]:
    """The least seconds of the whole model for one micro-batch, forward and backward."""
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
        # All stages but the first send gradients on before they do W.
        backs = [(parts.block[1] + parts.block_tp[1], parts, constants.inputs_share) for parts, constants, _ in timed]
        block = min(min(whole, share * (whole + parts.block_split)) for whole, parts, share in backs)
        share = min(share for _, _, share in backs)
        embedding = min(parts.embedding[1] for parts, _, _ in timed)
        return forward + head, layers * block + embedding + share * head_back + action * (1 + 2 * share * (stages - 1))
    return forward + head, backward + head_back
