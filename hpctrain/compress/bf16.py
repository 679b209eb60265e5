"""Gradients that travel in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.compress.departures import parts_of
from hpctrain.compress.reducer import KeepsNothing


class Bf16Wire(KeepsNothing):
    """Half the bytes of exact sums, at two roundings of each number to 8 bits of mantissa: on its way out, and of the
    sum on its way back."""

    granule = 2

    def bytes_of(self, numbers: int) -> int:
        return 2 * numbers

    def write(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        numbers = sum(tensor.numel() for tensor in tensors)
        flat = outgoing.flatten().view(torch.bfloat16)
        torch._foreach_copy_(parts_of(flat[:numbers], tensors), tensors)
        flat[numbers:] = 0

    def add_up(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        return incoming.view(torch.bfloat16).sum(0, dtype=torch.float32).to(torch.bfloat16).view(torch.uint8)

    def read(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        numbers = sum(tensor.numel() for tensor in tensors)
        flat = gathered.flatten().view(torch.bfloat16)
        torch._foreach_copy_(tensors, parts_of(flat[:numbers], tensors))
