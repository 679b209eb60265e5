"""Counts what tensor parallelism sends and waits for, at torch's functional collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):
    """Adds up, while active, the bytes that this rank sends in torch's functional collectives: those that the program
    calls, and those that DTensor calls within an operation. Stage messages and the reduction over replicas are not
    counted, because they call torch.distributed directly.

    Each collective counts as in its ring algorithm, which sends the least; the backend, with its headers, may send
    more. Counting slows every operation down, so the training loop counts few steps; shapes, and so bytes, do not
    change from step to step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0
        self.wait_s = 0.0
        """Seconds in which the host waited for these collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # A dispatch mode is off while it handles an operation. NotImplemented lets DTensor decompose its operations
        # with the mode still on, so that its collectives arrive here.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        self.sent_bytes += _sent(func, args)
        start_s = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.wait_s += time.perf_counter() - start_s
        return result


def _sent(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that one rank sends in the ring algorithm of a functional collective; 0 for an operation that
    sends nothing."""
    name = func._schema.name.rpartition("::")[2].removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    share = _SHARES.get(name)
    if share is None:
        return 0  # wait_tensor
    tensors = [args[0]] if isinstance(args[0], Tensor) else args[0]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    names = [argument.name for argument in func._schema.arguments]
    world = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[names.index("group_name")]))
    return int(size * share(world))


_NAMESPACES = ("_c10d_functional", "_dtensor")
"""Namespaces of torch's operators in which the functional collectives are."""

_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "all_gather_into_tensor": lambda world: world - 1,
    "reduce_scatter_tensor": lambda world: (world - 1) / world,
    "all_to_all_single": lambda world: (world - 1) / world,
    "shard_dim_alltoall": lambda world: (world - 1) / world,
    "broadcast": lambda world: (world - 1) / world,
}
"""Collective -> function from the number of ranks to the bytes that one rank sends, as a share of the collective's
input; for a broadcast the mean over ranks."""
