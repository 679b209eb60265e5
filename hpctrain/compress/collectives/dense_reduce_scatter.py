"""A reduce-scatter that sends every number once, straight to the rank that owns its sum.

gloo's own reduce-scatter is an all-reduce after which each rank keeps its part. It sends twice as much, and every rank
adds up everything.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.collectives.reduce_scatter import ReduceScatter


class DenseReduceScatter(ReduceScatter):
    """Reduce-scatter that sends every number in fp32 or bf16 and adds up in fp32, in rank order."""

    def __init__(self, wire_dtype: torch.dtype = torch.float32) -> None:
        self._wire_dtype = wire_dtype
        self._outgoing, self._incoming = Scratch(wire_dtype), Scratch(wire_dtype)

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        world = dist.get_world_size(group)
        outgoing = gradient
        if self._wire_dtype != gradient.dtype:
            outgoing = self._outgoing.take(gradient.shape, gradient).copy_(gradient)
        incoming = self._incoming.take(gradient.shape, gradient)
        dist.all_to_all_single(incoming, outgoing, group=group)
        torch.sum(incoming.view(world, -1), 0, dtype=output.dtype, out=output)
        return outgoing.nbytes // world * (world - 1)
