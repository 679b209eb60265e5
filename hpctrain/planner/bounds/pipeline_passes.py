"""Lower bounds of the seconds that a micro-batch takes through a pipeline and back, on any tensor-parallel groups."""

from __future__ import annotations

import numpy as np

from hpctrain.planner.bounds.arrays import FloatArray
from hpctrain.planner.bounds.option import Option
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.model import CostModel
from hpctrain.schedule.generate import V_SHAPED_SCHEDULES


class PipelinePasses:
    """Bounds for one number of pipeline ranks, schedule and micro-batch size.

    Every part of the model counts as on the tensor-parallel group that is fastest at it. Messages between stages count
    as within a node, except for those that must leave a node because the largest nodes have no more groups.
    """

    def __init__(self, cost: CostModel, unit_counts: UnitCounts, option: Option) -> None:
        self.unit_counts, self.option = unit_counts, option
        self._any_s, self._between_s = _hops_s(cost, unit_counts, option.micro_batch)
        one_way = self.hops_s(option.dims.pp)
        if option.virtual_stages > 1:
            # A V-shaped schedule goes back from the last rank; other schedules wrap from the last rank to the first. A
            # circle through n nodes crosses between them n times.
            wrap = self._between_s if unit_counts.least_nodes(option.dims.pp) > 1 else self._any_s
            if option.schedule_spec.name in V_SHAPED_SCHEDULES:
                wrap = 0.0
            one_way = option.virtual_stages * one_way + (option.virtual_stages - 1) * wrap
        self.one_way_s = one_way
        """Seconds of the messages of a forward pass through all stages."""
        forward, backward = _whole_s(cost, unit_counts, option)
        self.forward_s = forward + one_way
        """Seconds until a micro-batch has passed all stages forward."""
        self.both_s = self.forward_s + backward + one_way
        """Seconds until a micro-batch's gradient is back at the first stage; with split backwards, without W."""

    def hops_s(self, ranks: int) -> float:
        """Seconds of the messages of a pass through `ranks` neighbouring ranks."""
        crossing = self.unit_counts.least_nodes(ranks) - 1
        return crossing * self._between_s + (ranks - 1 - crossing) * self._any_s

    def step_s(self, micro_batches: int) -> float:
        """Seconds until a replica has done `micro_batches` micro-batches.

        With 1f1b the first rank holds at most `pp` micro-batches, so it starts another only when an earlier one is
        back.
        """
        trips = -(-micro_batches // self.option.dims.pp) if self.option.schedule_spec.name == "1f1b" else 1
        return trips * self.both_s


def warmup_forwards(option: Option) -> FloatArray:
    """[rank] -> the most forwards that the rank can do during the forward pass that its first backward waits for.

    Forwards of all stages of the rank count. With gpipe that forward pass is the one of the last micro-batch.
    """
    pp, name = option.dims.pp, option.schedule_spec.name
    ranks = np.arange(pp, dtype=np.float64)
    if name == "gpipe":
        return np.ones(pp)
    if name in V_SHAPED_SCHEDULES:
        return 2 * pp - 1 - ranks
    return pp - ranks if option.virtual_stages == 1 else np.full(pp, 2.0 * pp - 1)


def _hops_s(cost: CostModel, unit_counts: UnitCounts, micro_batch: int) -> tuple[float, float]:
    """Return the least seconds of any message between stages, and the least seconds of one that leaves a node."""
    work = cost.work
    # During the search all stages have one message codec, which is used only between nodes.
    within = work.message_bytes(micro_batch, unit_counts.tp, "none")
    between = work.message_bytes(micro_batch, unit_counts.tp, work.messages_behind(0))
    senders = unit_counts.tp if unit_counts.within_nodes else 1
    crossing_s = unit_counts.alpha + unit_counts.between_beta * senders * between
    if not unit_counts.within_nodes:
        return 0.0, crossing_s
    return min(crossing_s, *(alpha + beta * within for alpha, beta in unit_counts.inside)), crossing_s


def _whole_s(cost: CostModel, unit_counts: UnitCounts, option: Option) -> tuple[float, float]:
    """Return the least seconds of the whole model's forward for one micro-batch, and those of its backward."""
    layers, stages = cost.work.least_blocks, option.stages
    timed = [
        (cost.module_times(unit, option.micro_batch), cost.constants[unit.kind], unit) for unit, _ in unit_counts.kinds
    ]
    action = min(constants.action_ops * unit.launch_s for _, constants, unit in timed)
    forward, backward = (
        layers * min(parts.block[direction] + parts.block_tp[direction] for parts, _, _ in timed)
        + min(parts.embedding[direction] for parts, _, _ in timed)
        + stages * action
        for direction in (0, 1)
    )
    head, head_back = (min(parts.head[direction] for parts, _, _ in timed) for direction in (0, 1))
    if option.splits_backward and stages > 1:
        # All stages but the first send gradients on before they do W.
        backs = [(parts.block[1] + parts.block_tp[1], parts, constants.inputs_share) for parts, constants, _ in timed]
        block = min(min(whole, share * (whole + parts.block_split)) for whole, parts, share in backs)
        share = min(share for _, _, share in backs)
        embedding = min(parts.embedding[1] for parts, _, _ in timed)
        return forward + head, layers * block + embedding + share * head_back + action * (1 + 2 * share * (stages - 1))
    return forward + head, backward + head_back
