"""A reduce-scatter that sends every number once, straight to the rank that owns its sum.

gloo's own reduce-scatter is an all-reduce of which the owner keeps its part: it sends twice as much, and every rank
adds up everything.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class DenseReduceScatter:
    """A reduce-scatter that sends every number, in fp32 or bf16, and adds up in fp32 in rank order."""

    def __init__(self, wire_dtype: torch.dtype = torch.float32) -> None:
        self._wire_dtype = wire_dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world = dist.get_world_size(group)
        outgoing = gradient
        if self._wire_dtype != gradient.dtype:
            outgoing = self._memory("outgoing", gradient).copy_(gradient)
        incoming = self._memory("incoming", gradient)
        dist.all_to_all_single(incoming, outgoing, group=group)
        torch.sum(incoming.view(world, -1), 0, dtype=output.dtype, out=output)
        return outgoing.nbytes // world * (world - 1)

    def _memory(self, purpose: str, like: Tensor) -> Tensor:
        """A buffer that is reused from call to call, because fresh pages cost more than what is written to them. On
        CUDA torch's allocator reuses memory, and knows which stream is done with it."""
        if like.is_cuda:
            return torch.empty_like(like, dtype=self._wire_dtype)
        kept = self._buffers.get(purpose)
        if kept is None or kept.numel() < like.numel():
            kept = self._buffers[purpose] = torch.empty(like.numel(), dtype=self._wire_dtype)
        return kept[: like.numel()]
