"""The union of the positions that the ranks send: their bitmaps combined by OR."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.collectives.all_gather import all_gather


def union_of(positions: Tensor, numel: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """The positions that at least one rank has, sorted, the same on every rank. Collective over the group.

    Each rank combines one slice of all bitmaps and sends the result to the others: 2·(n−1)/n bits per number at n
    ranks. NCCL has no reduction by OR: a sum of bits would wrap, and a maximum takes a byte per number.

    Args:
        positions: int64, distinct, in [0, numel): those of this rank.
        numel: the same on every rank.

    Returns:
        The positions as int64, and the bytes this rank put on the wire.
    """
    world = dist.get_world_size(group)
    slice_bytes = -(-numel // (8 * world))
    mine = pack(positions, slice_bytes * world)
    slices = torch.empty_like(mine)
    dist.all_to_all_single(slices, mine, group=group)
    combined, *others = slices.view(world, slice_bytes)
    for other in others:
        combined |= other
    all_gather(mine, combined, group=group)
    return unpack(mine), 2 * (world - 1) * slice_bytes


def pack(positions: Tensor, length: int) -> Tensor:
    """A bitmap of `length` bytes, least significant bit first, with the bits at these distinct positions set."""
    bitmap = torch.zeros(length, dtype=torch.uint8, device=positions.device)
    # No bit is added twice, so a sum of bits is their OR.
    return bitmap.index_add_(0, positions >> 3, torch.bitwise_left_shift(1, positions & 7).to(torch.uint8))


def unpack(bitmap: Tensor) -> Tensor:
    """The positions of the bits that are set, sorted, as int64."""
    if bitmap.device.type == "cpu":
        # numpy's search is faster than torch's on one thread.
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bitmap.numpy(), bitorder="little")))
    at = bitmap.nonzero().squeeze(1)
    bits = torch.bitwise_right_shift(bitmap[at, None], torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    byte, bit = bits.nonzero(as_tuple=True)
    return at[byte] * 8 + bit
