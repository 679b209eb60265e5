"""How much of the sums over replicas passes while the backward pass is at work, as the workers' reducers do it."""

from __future__ import annotations

from hpctrain.planner.cost.all_reduce import overlaps_backward
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.plan.compression import Bf16, NoCompression, Quantized


def overlapped_share(work: Workload, stages: int, tp: int) -> float:
    """Share of the messages that may leave before the backward pass is over: where any may, all but the embedding's,
    whose gradient is the last to be ready.

    Of sums that have owners it is the half that hands gradients out; the sums follow a few buckets behind. Integers in
    fp16 wait until gradients are freed of the loss scale, which is after the backward.
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
    """Of a replica's messages of `wire_s` seconds, those that pass during its last backward.

    Args:
        wire_s: of the one stage of a replica; with several none pass.
    """
    share = overlapped_share(cost.work, len(layout.blocks), layout.tp)
    if share == 0.0:
        return 0.0
    backward = (
        cost.stage(layout.unit(replica, 0), layout.micro_batch, layout.model_parts[0]).backward
        for replica in layout.placement.representatives
    )
    return min(wire_s * share, *backward)
