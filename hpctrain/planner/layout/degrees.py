"""The degrees of parallelism that a search tries."""

from __future__ import annotations

from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import ParallelDims

EXHAUSTIVE_DEVICES = 64
"""Largest number of devices of which a plan may leave any number idle; with more, it may leave few or none idle."""
IDLE_DIVISOR = 8
"""With more than `EXHAUSTIVE_DEVICES` devices, at most one device in this many is left idle."""
FEW_DEVICES = 8
"""Largest number of devices for which impossible degrees are listed too, so that the plan can give the reasons."""


def enumerate_dims(devices: int, spec: Spec, sequences: int) -> list[ParallelDims]:
    """The (pp, dp, tp) to try, with a product of at most `devices`."""
    if devices <= FEW_DEVICES:
        whole = range(1, devices + 1)
        return [ParallelDims(pp, dp, tp) for pp in whole for dp in whole for tp in whole if pp * dp * tp <= devices]
    dims = []
    splits = [tp for tp in range(1, devices + 1) if spec.tensor_parallel_error(tp) is None]
    for pp in range(1, min(devices, spec.layers) + 1):
        if devices > EXHAUSTIVE_DEVICES and spec.layers % pp and pp & (pp - 1):
            continue  # neither an even cut nor a power of two
        for tp in splits:
            most = min(devices // (pp * tp), sequences)
            if devices <= EXHAUSTIVE_DEVICES:
                dims += [ParallelDims(pp, dp, tp) for dp in range(1, most + 1)]
                continue
            least = -(-min_devices_used(devices) // (pp * tp))
            if most < least and most < sequences:
                continue
            # Try the largest number of replicas, and the largest number that divides the batch evenly.
            even = next((dp for dp in range(most, max(least, 1) - 1, -1) if sequences % dp == 0), most)
            dims += [ParallelDims(pp, dp, tp) for dp in dict.fromkeys((even, most)) if dp]
    return dims if devices <= EXHAUSTIVE_DEVICES else list(dict.fromkeys([*dims, ParallelDims(1, 1, 1)]))


def min_devices_used(devices: int) -> int:
    """The fewest devices that a plan uses out of more than `EXHAUSTIVE_DEVICES`, unless it uses only one."""
    return devices - devices // IDLE_DIVISOR
