"""What a micro-batch's way through a pipeline and back takes at least, whichever units do it, wherever they stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.unit_counts import Crowd
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Order
from hpctrain.schedule.generate import SPLIT_BACKWARD
from hpctrain.schedule.placement import V_SHAPED


class Passes:
    """Of one number of pipeline ranks, schedule and micro-batch size.

    Every part of the model counts as on the unit that is fastest at it, and every hop as within a node but for those
    that must leave one, as there are so many units in the largest nodes.

    Args:
        size: rows of a micro-batch.
    """

    def __init__(self, cost: CostModel, crowd: Crowd, pp: int, order: Order, size: int) -> None:
        self.crowd, self.pp, self.order = crowd, pp, order
        self._any_s, self._between_s = _hops_s(cost, crowd, size)
        one_way = self.hops_s(pp)
        if order.chunks > 1:
            # Up again from where it went down, or from the last rank to the first: around a circle of n nodes that is
            # n hops between them.
            wrap = 0.0 if order.schedule in V_SHAPED else self.hop_s(crowd.least_nodes(pp) > 1)
            one_way = order.chunks * one_way + (order.chunks - 1) * wrap
        self.one_way_s = one_way
        """Messages of a way through all stages."""
        forward, backward = _whole_s(cost, crowd, pp * order.chunks, order.schedule in SPLIT_BACKWARD, size)
        self.forward_s = forward + one_way
        """Until it has passed all stages."""
        self.both_s = self.forward_s + backward + one_way
        """Until its gradient has come back to the first stage. Weights' backwards that may wait do not count."""

    def hop_s(self, between: bool) -> float:
        """Seconds of a message to the next stage."""
        return self._between_s if between else self._any_s

    def hops_s(self, ranks: int) -> float:
        """Seconds of the messages of a way through so many neighbouring ranks."""
        crossing = self.crowd.least_nodes(ranks) - 1
        return crossing * self.hop_s(True) + (ranks - 1 - crossing) * self._any_s

    def step_s(self, micro_batches: int) -> float:
        """Seconds until a replica is through with so many.

        With 1f1b the first rank keeps `pp` of them at most, so it goes on only when an earlier one is back.
        """
        trips = -(-micro_batches // self.pp) if self.order.schedule == "1f1b" else 1
        return trips * self.both_s


def early_forwards(order: Order, pp: int) -> NDArray[np.float64]:
    """[rank] -> micro-batches at most, in any of a rank's stages, whose forward may be over while a way through all
    stages is on that the rank's first backward waits for.

    With gpipe it is the last micro-batch's way.
    """
    ranks = np.arange(pp, dtype=np.float64)
    if order.schedule == "gpipe":
        return np.ones(pp)
    if order.schedule in V_SHAPED:
        return 2 * pp - 1 - ranks
    return pp - ranks if order.chunks == 1 else np.full(pp, 2.0 * pp - 1)


def _hops_s(cost: CostModel, crowd: Crowd, size: int) -> tuple[float, float]:
    """The least seconds of any message, and of one between two nodes."""
    work = cost.work
    # The search knows one way for all stages, and only what leaves a node travels in it.
    within = work.message_bytes(size, crowd.tp, "none")
    between = work.message_bytes(size, crowd.tp, work.messages_behind(0))
    crossing_s = crowd.alpha + crowd.between_beta * (crowd.tp if crowd.within_nodes else 1) * between
    if not crowd.within_nodes:
        return 0.0, crossing_s
    return min(crossing_s, *(alpha + beta * within for alpha, beta in crowd.inside)), crossing_s


def _whole_s(cost: CostModel, crowd: Crowd, stages: int, split: bool, size: int) -> tuple[float, float]:
    """The whole model, forward and backward."""
    layers = cost.work.least_blocks
    timed = [(cost.parts(unit, size), cost.constants[unit.kind], unit) for unit, _ in crowd.kinds]
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
