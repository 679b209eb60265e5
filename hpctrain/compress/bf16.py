"""Sums of gradients that travel in bfloat16 and are added up in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.gathering import all_gather
from hpctrain.compress.reducer import BUCKET_BYTES, DenseReducer, KeepsNothing, parts_of, positions


class Bf16Reducer(KeepsNothing):
    """Half the bytes of exact sums, at two roundings of each number to 8 bits of mantissa: on its way out, and of the
    sum on its way back.

    A bucket goes as an all-to-all, in which each rank gets its part of everybody's gradient and adds it up in fp32,
    and an all-gather of the sums: the bytes of a ring all-reduce, which would round after every addition.
    """

    def __init__(self, group: dist.ProcessGroup, chosen: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> None:
        """
        Args:
            group: the replicas.
            chosen: positions in the list of gradients of those that travel in bf16; the others are summed exactly.
            bucket_bytes: of gradients that go together.
        """
        self._group = group
        self._chosen = chosen
        self._rest = DenseReducer(group)
        self._world = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[list[int]] = []
        self._spare: list[Tensor] = []

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        chosen = [gradients[index] for index in self._chosen]
        apart = set(self._chosen)
        sent = self._rest.reduce([gradient for index, gradient in enumerate(gradients) if index not in apart])
        if not self._buckets:
            self._buckets = positions(chosen, self._bucket_bytes)
        scattered, gathered = None, None
        # While one bucket is added up, the next is on its way out, and the one before on its way back.
        for bucket in self._buckets:
            later = self._scatter([chosen[index] for index in bucket])
            if gathered is not None:
                self._bring_home(gathered)
            gathered = self._sum(scattered) if scattered is not None else None
            scattered = later
            sent += 2 * (self._world - 1) * later.outgoing.nbytes // self._world
        for flight in (gathered, self._sum(scattered) if scattered is not None else None):
            if flight is not None:
                self._bring_home(flight)
        return sent

    def _scatter(self, tensors: list[Tensor]) -> _Flight:
        """Begin to hand out a bucket."""
        numbers = sum(tensor.numel() for tensor in tensors)
        padded = -(-numbers // self._world) * self._world
        outgoing, incoming = self._memory(padded, tensors[0]), self._memory(padded, tensors[0])
        torch._foreach_copy_(parts_of(outgoing[:numbers], tensors), tensors)
        outgoing[numbers:] = 0
        work = dist.all_to_all_single(incoming, outgoing, group=self._group, async_op=True)
        return _Flight(tensors, outgoing, incoming, work)

    def _sum(self, flight: _Flight) -> _Flight:
        """Add up this rank's part and begin to send it to everybody."""
        with ACTIVITY.doing("all-to-all over dp, bf16", waits=True):
            flight.work.wait()
        part = flight.incoming.view(self._world, -1).sum(0, dtype=torch.float32).to(torch.bfloat16)
        work = all_gather(flight.outgoing, part, group=self._group, async_op=True)
        return _Flight(flight.tensors, flight.outgoing, flight.incoming, work, part)

    def _bring_home(self, flight: _Flight) -> None:
        with ACTIVITY.doing("all-gather over dp, bf16", waits=True):
            flight.work.wait()
        numbers = sum(tensor.numel() for tensor in flight.tensors)
        torch._foreach_copy_(flight.tensors, parts_of(flight.outgoing[:numbers], flight.tensors))
        self._spare += [flight.outgoing, flight.incoming]

    def _memory(self, numbers: int, like: Tensor) -> Tensor:
        """Kept memory, because fresh pages cost more than what is written to them."""
        for index, spare in enumerate(self._spare):
            if spare.storage_offset() == 0 and spare.untyped_storage().nbytes() >= 2 * numbers:
                return self._spare.pop(index).as_strided((numbers,), (1,))
        return like.new_empty(numbers, dtype=torch.bfloat16)


@dataclass(frozen=True)
class _Flight:
    """A bucket on the wire."""

    tensors: list[Tensor]
    outgoing: Tensor
    """The bucket in bf16, its gradients one after the other; once gathered, their sums."""
    incoming: Tensor
    work: dist.Work
    part: Tensor | None = None
    """This rank's sums, which must live until they are sent."""
