"""The degrees of parallelism that a search tries."""

from __future__ import annotations

from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.parallel_dims import ParallelDims

EXHAUSTIVE_DEVICES = 64
"""Up to this many devices, a plan may use any number of them; beyond, only degrees that leave few or none idle."""
IDLE_DIVISOR = 8
"""Beyond `EXHAUSTIVE_DEVICES`, at most one in this many devices is left idle."""
FEW_DEVICES = 8
"""Up to this many devices, impossible degrees are listed too, so that the plan can give their reasons."""


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
            # The largest number of replicas, and the largest that divides the batch evenly.
            even = next((dp for dp in range(most, max(least, 1) - 1, -1) if sequences % dp == 0), most)
            dims += [ParallelDims(pp, dp, tp) for dp in dict.fromkeys((even, most)) if dp]
    return dims if devices <= EXHAUSTIVE_DEVICES else list(dict.fromkeys([*dims, ParallelDims(1, 1, 1)]))


def min_devices_used(devices: int) -> int:
    """The fewest devices that a plan uses out of many (more than `EXHAUSTIVE_DEVICES`), unless it uses only one."""
    return devices - devices // IDLE_DIVISOR
