"""Bytes that tensor parallelism puts on the wire, counted where they are sent: at torch's functional collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):
    """While active, adds up what this rank sends in functional collectives (DTensor uses nothing else).

    Shapes do not change from step to step, so one counted step stands for all; counting every step would slow each
    operation down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.sent_bytes += _sent(func, args)
        return func(*args, **(kwargs or {}))


def _sent(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes one rank sends in a ring implementation of the collective."""
    name = func._schema.name.rpartition("::")[2].rstrip("_")
    share = _SHARES.get(name)
    if share is None:
        return 0  # wait_tensor and the like send nothing
    size = args[0].numel() * args[0].element_size()
    return int(size * share(dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[-1]))))


_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "all_gather_into_tensor": lambda world: world - 1,
    "reduce_scatter_tensor": lambda world: (world - 1) / world,
}
"""Collective -> bytes sent by each rank of `world`, as a share of its input."""
