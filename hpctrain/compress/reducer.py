"""What a reducer does, and the dense one: exact sums, an ordinary member of the family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.compress.arrivals import Arrivals

BUCKET_BYTES = 8 * 2**20
"""Gradients are sent in pieces of this size: large enough for full bandwidth, small enough that the first leaves early."""


class Reducer(Protocol):
    """Sums gradients over the replicas of a stage."""

    def reduce(self, gradients: list[Tensor]) -> int:
        """Replace each tensor by its sum over the group. Collective over the group.

        Returns:
            Bytes this rank put on the wire.
        """


class DenseReducer:
    """Exact sums in the gradients' own precision, by ring all-reduce, beside the backward pass where that is allowed."""

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group = group
        self._world = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._arrivals: Arrivals | None = None

    def overlap(self, parameters: list[nn.Parameter]) -> None:
        """From the second step on, send a bucket as soon as the backward pass has finished its gradients.

        Call it once, with plain parameters in the order in which `reduce` gets their gradients, and only where nothing
        else is sent during the backward pass.
        """
        if self._world > 1:
            self._arrivals = Arrivals(parameters, self._send_ready)
            self._arrivals.listen()

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        if not self._buckets:
            self._buckets = _make_buckets(gradients, self._bucket_bytes)
        for bucket in self._buckets:
            if bucket.work is None:
                bucket.send([gradients[index] for index in bucket.members], self._group)
        for bucket in self._buckets:
            bucket.receive([gradients[index] for index in bucket.members])
        if self._arrivals is not None:
            self._arrivals.next_step()
        # A ring all-reduce sends every byte on 2·(n−1)/n times from each rank.
        sizes = [bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets]
        return sum(2 * (self._world - 1) * size // self._world for size in sizes)

    def _send_ready(self, arrivals: Arrivals) -> None:
        # In the order of the buckets on every rank, whatever order they become ready in: the ranks must agree on it.
        for bucket in self._buckets:
            if bucket.work is None:
                if not all(arrivals.complete[index] for index in bucket.members):
                    return
                bucket.send([arrivals.gradient(index) for index in bucket.members], self._group)


@dataclass
class _Bucket:
    """Gradients that travel together, in memory that is kept: fresh pages would cost more than the copy."""

    members: list[int]
    """Positions in the list of gradients."""
    flat: Tensor
    work: dist.Work | None = None

    def send(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        torch._foreach_copy_(self._parts(tensors), tensors)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self, tensors: list[Tensor]) -> None:
        assert self.work is not None, "sent before"
        self.work.wait()
        self.work = None
        torch._foreach_copy_(tensors, self._parts(tensors))

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        parts = self.flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _make_buckets(gradients: list[Tensor], limit_bytes: int) -> list[_Bucket]:
    """The last gradients first: a backward pass finishes them first."""
    positions = list(range(len(gradients)))[::-1]
    made: list[_Bucket] = []
    for group in buckets([gradients[index] for index in positions], limit_bytes):
        members = [positions.pop(0) for _ in group]
        made.append(_Bucket(members, group[0].new_empty(sum(tensor.numel() for tensor in group))))
    return made


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
