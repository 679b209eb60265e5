"""Forms the union of the positions that the ranks send, by combining their bitmaps with OR."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.indices import mask_of, pack_bits, positions_of, unpack_bits
from hpctrain.compress.collectives.all_gather import all_gather


def union_of(positions: Tensor, numel: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the positions that at least one rank has, sorted, the same on every rank. Collective over the group.

    Each rank combines one slice of all bitmaps and sends the result to the others. That takes 2·(n−1)/n bits per number
    at n ranks. NCCL has no reduction by OR: a sum of bits would wrap, and a maximum takes a byte per number.

    Args:
        positions: int64, distinct, in [0, numel): the positions of this rank.
        numel: count of numbers, the same on every rank.

    Returns:
        The positions as int64, and the bytes that this rank sent.
    """
    world = dist.get_world_size(group)
    slice_bytes = -(-numel // (8 * world))
    numbers = 8 * slice_bytes * world
    bitmap = pack_bits(mask_of(positions, numbers))
    slices = torch.empty_like(bitmap)
    dist.all_to_all_single(slices, bitmap, group=group)
    combined, *others = slices.view(world, slice_bytes)
    for other in others:
        combined |= other
    all_gather(bitmap, combined, group=group)
    return positions_of(unpack_bits(bitmap, numbers)), 2 * (world - 1) * slice_bytes
