"""What a reducer does, and the dense one: exact sums, an ordinary member of the family."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY

BUCKET_BYTES = 32 * 2**20
"""Gradients are sent in pieces of this size: large enough for full bandwidth, small enough to need little memory."""


class Reducer(Protocol):
    """Sums gradients over the replicas of a stage."""

    def reduce(self, gradients: list[Tensor]) -> int:
        """Replace each tensor by its sum over the group. Collective over the group.

        Returns:
            Bytes this rank put on the wire.
        """


class DenseReducer:
    """Exact sums in the gradients' own precision, by ring all-reduce."""

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group = group
        self._world = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        sent = 0
        for number, bucket in enumerate(buckets(gradients, self._bucket_bytes)):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with ACTIVITY.doing(f"all-reduce over dp, bucket {number}", waits=True):
                dist.all_reduce(flat, group=self._group)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
            # A ring all-reduce sends every byte on 2·(n−1)/n times from each rank.
            sent += 2 * (self._world - 1) * flat.numel() * flat.element_size() // self._world
        return sent


def buckets(tensors: list[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype, grouped up to `limit_bytes`; a larger tensor is a bucket of its own."""
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if groups and size + bytes_ <= limit_bytes and groups[-1][0].dtype == tensor.dtype:
            groups[-1].append(tensor)
            size += bytes_
        else:
            groups.append([tensor])
            size = bytes_
    return groups
