"""Overlap of the data-parallel all-reduce with the backward pass, as the workers' reducers do it."""

from __future__ import annotations

from hpctrain.planner.cost.all_reduce import overlaps_backward
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.plan.compression import Bf16, NoCompression, Quantized


def overlapped_share(work: Workload, stages: int, tp: int) -> float:
    """Share of the all-reduce's messages that may be sent before the backward pass ends.

    If any may, these are all but the embedding's, whose gradient is ready last. With bf16 and integers it is half of
    that: the reduce-scatter; the all-gather follows a few buckets behind. With fp16, integers wait until the loss scale
    is removed, after the backward pass.
    """
    if not overlaps_backward(work, stages, tp):
        return 0.0
    match work.codec:
        case NoCompression():
            share = 1.0
        case Bf16():
            share = 0.5
        case Quantized() if work.precision != "fp16":
            share = 0.5
        case _:
            return 0.0
    return share * (1 - work.spec.embedding_parameters() / work.spec.parameters())


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
