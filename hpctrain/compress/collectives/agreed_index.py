"""The index of sums of selected numbers: the positions on which the ranks agree before they send numbers.

The form `union` lists the positions that at least one rank selected. The forms `4bit` and `1bit` are those of the
published code of lossless homomorphic compression and of TAGC: NCCL has no reduction by OR, so that a sum stands for
it. A sum of 4 bits for each number is right for up to 15 ranks. A sum of single bits is not: where two ranks select the
same position, its bit becomes 0 and a carry sets the bit of the next position.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.sparse_message import mask_of, pack_bits, positions_of, unpack_bits
from hpctrain.compress.collectives.exchange import all_gather
from hpctrain.records.plan.compression import IndexForm


def agreed_index(form: IndexForm, positions: Tensor, numel: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the ascending positions of the index, the same on all ranks, and the bytes that this rank sent. Collective
    over the group.

    Args:
        form: form of the index, as the docstring of this module describes it.
        positions: int64, distinct, in [0, numel): the positions of this rank.
        numel: count of numbers, the same on every rank.
        group: the ranks.
    """
    if form == "union":
        return union_of(positions, numel, group)
    return _summed(positions, numel, int(form.removesuffix("bit")), group)


def union_of(positions: Tensor, numel: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the sorted positions that at least one rank has, and the bytes that this rank sent. Collective over the
    group.

    All ranks get the same positions. A rank's bitmap has one bit for each of the `numel` numbers, 1 at the rank's
    positions. Each rank combines one slice of all ranks' bitmaps and sends the result to the others. At n ranks, each
    rank sends 2·(n−1)/n bits for each of the `numel` numbers. NCCL has no reduction by OR: a sum of bits would wrap,
    and a maximum takes a byte per number.

    Args:
        positions: int64, distinct, in [0, numel): the positions of this rank.
        numel: count of numbers, the same on every rank.
        group: the ranks.
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


def _summed(positions: Tensor, numel: int, bits: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the positions whose field of `bits` bits is not 0 in the sum of all ranks' fields, and the bytes that this
    rank sent. Fields lie in bytes, which are summed modulo 256; so a field that overflows adds 1 to the next one.
    """
    world, in_byte = dist.get_world_size(group), 8 // bits
    fields = torch.zeros(-(-numel // in_byte), dtype=torch.uint8, device=positions.device)
    fields.index_add_(0, positions // in_byte, (1 << (positions % in_byte * bits)).to(torch.uint8))
    dist.all_reduce(fields, group=group)
    parts = [(fields >> (place * bits)) & (2**bits - 1) for place in range(in_byte)]
    index = torch.stack(parts, dim=1).flatten()[:numel].nonzero().squeeze(1)
    return index, 2 * (world - 1) * fields.numel() // world
