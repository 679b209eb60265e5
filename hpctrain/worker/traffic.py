"""Bytes that tensor parallelism puts on the wire, counted where they are sent: at torch's functional collectives."""

from __future__ import annotations

from typing import Any

import torch
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
    if not args or not isinstance(args[0], torch.Tensor):
        return 0
    name = func._schema.name.rpartition("::")[2].rstrip("_")
    size = args[0].numel() * args[0].element_size()
    world = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[-1]))
    if name == "all_reduce":
        return 2 * (world - 1) * size // world
    if name == "all_gather_into_tensor":
        return (world - 1) * size
    if name == "reduce_scatter_tensor":
        return (world - 1) * size // world
    return 0
