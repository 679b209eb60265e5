"""Overlap of the data-parallel all-reduce with the backward pass, by the rules of the workers' reducers."""

from __future__ import annotations

from hpctrain.planner.cost.collectives import overlaps_backward
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.layout.layout import Layout


def overlapped_share(work: Workload, stages: int, tp: int) -> float:
    """Share of the all-reduce's messages that may be sent before the backward pass ends.

    If messages may overlap at all, the share is the codec's, less the embedding, whose gradient is ready last. With
    fp16, a codec with state waits until the loss scale is removed, which is after the backward pass.
    """
    if not overlaps_backward(work, stages, tp) or (work.precision == "fp16" and work.codec.has_state):
        return 0.0
    return work.codec.overlap * (1 - work.spec.embedding_parameters() / work.spec.parameters())


def overlapped_s(cost: CostModel, layout: Layout, wire_s: float) -> float:
    """Seconds of an all-reduce that overlap the replica's last backward; 0 with several stages.

    Args:
        wire_s: seconds of the all-reduce's messages.
    """
    share = overlapped_share(cost.work, len(layout.blocks), layout.tp)
    if share == 0.0:
        return 0.0
    backward = (
        cost.stage(layout.unit(replica, 0), layout.micro_batch, layout.model_parts[0]).backward
        for replica in layout.placement.representatives
    )
    return min(wire_s * share, *backward)
