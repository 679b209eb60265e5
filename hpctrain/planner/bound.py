"""What no plan can beat, by the same cost model: work divided by the speed of all devices together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.planner.constants import CONSTANTS
from hpctrain.planner.cost import CostModel
from hpctrain.planner.fleet import Fleet, Worker
from hpctrain.planner.parts import Parts
from hpctrain.planner.unit import Unit
from hpctrain.planner.workload import Order, Workload
from hpctrain.schedule.generate import SPLIT_BACKWARD


def step_bound(fleet: Fleet, work: Workload) -> float:
    """Seconds per step that no plan on the fleet beats: products, kept activations, logits and the update.

    Launches, messages, bubbles, weight traffic and whatever is done on several devices are left out, because some plan
    may avoid them.
    """
    parts = [_unavoidable(work, worker) for worker in fleet.workers]
    speeds = relative_speeds(parts)
    together = sum(speeds)
    # Device u, busy for compute and update, is not done before T. Weighted by speed over all devices:
    # T >= sum(w_u · busy_u) + sum(w_u · update_u), and every parameter is updated somewhere.
    lightest = min(
        speed / together * CONSTANTS[worker.kind].optimizer_bytes / worker.bytes_per_s
        for speed, worker in zip(speeds, fleet.workers, strict=True)
    )
    return work.rows * sum(parts[0]) / together + work.spec.parameters() * lightest


def relative_speeds(parts: Sequence[Sequence[float]]) -> list[float]:
    """Speed of each device against the first, at the part of the work that it is best at.

    A device that did everything at the pace of its best part would be that fast, so sums of these never
    underestimate what devices can do together, however the parts are shared out.

    Args:
        parts: [device][part] seconds of each part of the work.
    """
    reference = parts[0]
    return [max((a / b for a, b in zip(reference, own, strict=True) if b > 0), default=1.0) for own in parts]


def search_bound(cost: CostModel, units: Sequence[Unit], pp: int, dp: int, micro_batch: int) -> float:
    """Seconds that no layout of this shape and micro-batch beats on any pp × dp of the units."""
    layers = cost.work.spec.layers
    timed = [cost.parts(unit, micro_batch) for unit in units]
    parts = [(layers * (sum(each.block) + sum(each.block_tp)), sum(each.embedding), sum(each.head)) for each in timed]
    speeds = sorted(relative_speeds(parts), reverse=True)[: pp * dp]
    count = cost.work.rows // micro_batch
    work_s = count * sum(parts[0])
    bound = work_s / sum(speeds)
    if max(speeds) - min(speeds) < 1e-9:
        fill = math.inf
        # Equal devices: replicas hold whole micro-batches, and filling the pipeline cannot be cut away altogether.
        # Smallest max(M·x, (pp − 1)·w·x + M·y) over ranks of time x and a last one of y, with (pp − 1)·x + y the
        # model, of which the part w lies before the last rank's first action or after its last.
        most, whole = -(-count // dp), sum(parts[0])
        for order in cost.work.orders(pp):
            way, without = _on_the_way(order, timed[0], layers)
            filled = most * (most * whole - way * without) / (most * pp - (pp - 1) * way)
            fill = min(fill, filled)
        bound = max(bound, fill)
    return bound


def _on_the_way(order: Order, parts: Parts, layers: int) -> tuple[float, float]:
    """Part of a rank's work that must be over before the next rank starts, or begins after it has ended; and the
    seconds of the model that are no such work.

    Where weights' backwards may wait they fill the end, so only forwards are on the way, and the embedding has none.
    """
    if order.schedule not in SPLIT_BACKWARD:
        return 1 / order.chunks, 0.0
    forward, backward = (parts.block[way] + parts.block_tp[way] for way in (0, 1))
    return forward / (forward + backward + parts.block_split) / order.chunks, sum(parts.embedding)


def _unavoidable(work: Workload, worker: Worker) -> tuple[float, float]:
    """Seconds per row (blocks, head) on a device."""
    spec, seq_len = work.spec, work.seq_len
    head = spec.forward_flops(1, seq_len, spec.layers)
    blocks = spec.forward_flops(1, seq_len) - head
    constants = CONSTANTS[worker.kind]
    kept = spec.layers * work.block_bytes(1, 1) * sum(constants.activation_passes)
    logits = spec.logits_bytes(1, seq_len) * sum(constants.logits_passes)
    speed = worker.flops * constants.efficiency
    return 3 * blocks / speed + kept / worker.bytes_per_s, 3 * head / speed + logits / worker.bytes_per_s
