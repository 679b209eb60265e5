"""Lower bound for all plans: the work of a step divided by the speed of all devices together."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.constants import CostConstants
from hpctrain.planner.devices.pool import DevicePool, DeviceSpec


def ideal_step_s(pool: DevicePool, work: Workload) -> float:
    """Seconds of a step that no plan on the pool beats.

    The bound counts matrix products, activations that are saved for the backward pass, logits and the update. It leaves
    out launches, messages, bubbles, weight traffic and duplicated work, because some plan may avoid them.
    """
    parts = [_unavoidable(work, device, pool.constants[device.kind]) for device in pool.devices]
    speeds, whole = relative_speeds(parts)
    together = sum(speeds)
    # Device u, busy for compute and update, is not done before T. Weighted by speed over all devices:
    # T >= sum(w_u · busy_u) + sum(w_u · update_u), and every parameter is updated somewhere.
    lightest = min(
        speed / together * pool.constants[device.kind].optimizer_bytes / device.bytes_per_s
        for speed, device in zip(speeds, pool.devices, strict=True)
    )
    return work.sequences * whole / together + work.spec.parameters() * lightest


def relative_speeds(parts: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return the speed of each device relative to the first device, and the total work.

    The unit of work is such that the first device has speed 1 at the first part. The work of a part is the smallest
    product of speed and seconds over the devices. So no device does more work in a second than its speed, however the
    parts are distributed.

    Args:
        parts: [device][part] -> seconds of each part of the work.
    """
    speeds = [parts[0][0] / seconds[0] for seconds in parts]
    by_part = zip(*parts, strict=True)
    return speeds, sum(min(speed * s for speed, s in zip(speeds, part, strict=True)) for part in by_part)


def _unavoidable(work: Workload, device: DeviceSpec, constants: CostConstants) -> tuple[float, float]:
    """Return the seconds per sequence that all blocks take on a device, and those that the head takes."""
    spec, seq_len = work.spec, work.seq_len
    head = spec.forward_flops(1, seq_len, spec.layers)
    blocks = spec.forward_flops(1, seq_len) - head
    activations = spec.layers * work.block_bytes(1, 1) * sum(constants.activation_passes)
    logits = spec.logits_bytes(1, seq_len) * sum(constants.logits_passes)
    speed = device.flops * constants.efficiency
    return 3 * blocks / speed + activations / device.bytes_per_s, 3 * head / speed + logits / device.bytes_per_s
