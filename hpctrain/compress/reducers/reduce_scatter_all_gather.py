"""All-reduce in fewer bytes than fp32 needs: each rank adds up one part of every bucket and sends the sums to all
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.collectives.exchange import all_gather
from hpctrain.compress.collectives.overlapped_work import OverlappedWork
from hpctrain.compress.collectives.reduce_scatter import StepState
from hpctrain.compress.reducers.bucket_scheduler import BucketScheduler, unflatten_like
from hpctrain.compress.reducers.reducer import CodecReducer
from hpctrain.records.plan.compression import BUCKET_BYTES

BUCKETS_SCATTERED_AHEAD = 2
"""Count of buckets whose all-to-all starts before the oldest of them is added up, so that one is always on the wire."""
BUCKETS_IN_FLIGHT = 4
"""Largest count of buckets whose memory is in use at a time."""


class BucketCodec(StepState, ABC):
    """Interface of a codec that encodes a bucket in one part per rank, adds up a part and decodes the sums.

    Its state is keyed by the index of a gradient in the list that `reduce` gets.
    """

    part_multiple: int
    """The count of numbers in a part is a multiple of this number."""

    @abstractmethod
    def bytes_of(self, numbers: int) -> int:
        """Return the length in bytes of the message for a part of `numbers` numbers. The length is a multiple of 4."""

    @abstractmethod
    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        """Encode the gradients of a bucket, one after the other, with zeros after the last one.

        Args:
            bucket: for each of `tensors`, its index among all gradients; the same in every step.
            tensors: the gradients of the bucket, fp32.
            outgoing: [ranks, bytes of a part], uint8; written to. Row i is the message to rank i.

        Raises:
            CheckpointError: a loaded residual has another size than its gradient.
        """

    @abstractmethod
    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        """Return the sums of this rank's part, encoded in newly allocated memory: [bytes of a part], uint8.

        Args:
            bucket: indices of the bucket's gradients among all gradients.
            incoming: [ranks, bytes of a part], uint8: all ranks' messages about the part.
            rank: rank of this process in its group, which is the index of its part.
        """

    @abstractmethod
    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        """Replace the gradients of a bucket by their decoded sums.

        Args:
            bucket: indices of the bucket's gradients among all gradients.
            gathered: [ranks, bytes of a part], uint8: the encoded sums of all parts; the same on every rank.
            tensors: the gradients, fp32; overwritten.
        """


class ReduceScatterAllGather(CodecReducer):
    """Reducer in which each rank owns a part of every bucket and adds it up.

    For each bucket, an all-to-all gives each rank its part of all ranks' gradients, which it adds up in fp32; an
    all-gather then sends the sums to all ranks. There are as many messages, of the same size, as in a ring all-reduce,
    but a ring would round after every addition. All ranks decode the same bytes, so they have the same sums.
    """

    def __init__(
        self, group: dist.ProcessGroup, codecs: Mapping[int, BucketCodec], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Create the reducer before the first step.

        Args:
            group: the replicas.
            codecs: index of a gradient, ascending -> the codec that encodes, adds up and decodes its bucket. A bucket
                has gradients of one codec. The others are summed exactly.
            bucket_bytes: largest size of a bucket.
        """
        super().__init__(group, list(codecs))
        self._codecs = codecs
        self.holder = StateByGradient(codecs)
        self._scheduler = BucketScheduler(self._send, bucket_bytes, self._make_room, list(codecs.values()))
        self._is_chosen: list[list[bool]] = []
        """For each group of `overlap`, which of its gradients the codec sends."""
        self._in_reduce_scatter: list[_BucketInFlight] = []
        self._in_all_gather: list[_BucketInFlight] = []
        self._pool = BufferPool()
        self._sent_bytes = 0

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None = None, hooks: bool = True
    ) -> None:
        if self._world == 1:
            return
        groups = [range(len(parameters))] if groups is None else groups
        place = {index: number for number, index in enumerate(self._chosen)}
        self._is_chosen = [[index in place for index in group] for group in groups]
        members = [[place[index] for index in group if index in place] for group in groups]
        self._scheduler.overlap([parameters[index] for index in self._chosen], members, hooks)

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        if self._world > 1:
            self._scheduler.group_done(number, list(compress(gradients, self._is_chosen[number])))

    def proceed(self) -> None:
        self._make_room()
        self._scheduler.proceed()

    def defer(self, deferred: bool) -> None:
        self._scheduler.is_deferred = deferred

    def reduce(self, gradients: list[Tensor]) -> int:
        self.begin(gradients)
        return self.finish()

    def begin(self, gradients: list[Tensor]) -> None:
        """Run the first half of `reduce`: send all gradients that are not sent yet, without waiting for all sums.

        Raises:
            RuntimeError: after `overlap`, the backward pass added to a gradient after it was sent.
        """
        if self._world > 1:
            tensors, exempt = self._split(gradients)
            self._scheduler.send_remaining(tensors)
            self._make_room(wait=True)  # so that the exempt gradients have the same place on all ranks
            self._exempt.begin(exempt)

    def finish(self) -> int:
        """Run the second half of `reduce`: wait for the sums. Return the bytes that this rank sent."""
        while self._in_reduce_scatter:
            self._start_all_gather()
        while self._in_all_gather:
            self._finish_all_gather()
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return sent_bytes + self._exempt.finish()

    def _make_room(self, wait: bool = False) -> bool:
        """Go on with the buckets on the wire until another one may be sent; return whether it may.

        Collectives start in one order on all ranks, because a bucket's all-gather always follows the all-to-all of the
        second bucket after it.

        Args:
            wait: whether to wait for other ranks.
        """
        while len(self._in_reduce_scatter) > BUCKETS_SCATTERED_AHEAD:
            if not (wait or self._in_reduce_scatter[0].work.has_ended):
                return False
            self._start_all_gather()
        while len(self._in_reduce_scatter) + len(self._in_all_gather) >= BUCKETS_IN_FLIGHT:
            if not (wait or self._in_all_gather[0].work.has_ended):
                return False
            self._finish_all_gather()
        return True

    def _send(self, number: int, tensors: list[Tensor]) -> None:
        """Start the all-to-all of a bucket.

        Args:
            number: number of the bucket, counted from 0 in each step.
            tensors: the bucket's gradients.
        """
        self._make_room(wait=True)
        numbers = sum(tensor.numel() for tensor in tensors)
        bucket, codec = self._bucket(number)
        part_multiple = self._world * codec.part_multiple
        part_bytes = codec.bytes_of(-(-numbers // part_multiple) * codec.part_multiple)
        outgoing, incoming = (
            self._pool.take(self._world * part_bytes, tensors[0], torch.uint8).view(self._world, -1) for _ in range(2)
        )
        codec.encode(bucket, tensors, outgoing)
        work = dist.all_to_all_single(incoming.flatten(), outgoing.flatten(), group=self._group, async_op=True)
        overlapped = OverlappedWork(work, outgoing.device)
        self._in_reduce_scatter.append(_BucketInFlight(number, tensors, outgoing, incoming, overlapped))
        self._sent_bytes += 2 * (self._world - 1) * part_bytes

    def _bucket(self, number: int) -> tuple[list[int], BucketCodec]:
        """Return the indices of a bucket's gradients in the list that `reduce` gets, and their codec."""
        bucket = [self._chosen[index] for index in self._scheduler.buckets[number]]
        return bucket, self._codecs[bucket[0]]

    def _start_all_gather(self) -> None:
        """Add up this rank's part of the bucket with the oldest all-to-all, and start the all-gather of the sums."""
        flight = self._in_reduce_scatter.pop(0)
        with ACTIVITY.doing(f"all-to-all over dp, bucket {flight.number}", waits="dp"):
            flight.work.wait()
        bucket, codec = self._bucket(flight.number)
        part = codec.reduce_part(bucket, flight.incoming, self._rank)
        work = all_gather(flight.outgoing.flatten(), part, group=self._group, async_op=True)
        self._in_all_gather.append(replace(flight, work=OverlappedWork(work, part.device), part=part))

    def _finish_all_gather(self) -> None:
        flight = self._in_all_gather.pop(0)
        with ACTIVITY.doing(f"all-gather over dp, bucket {flight.number}", waits="dp"):
            flight.work.wait()
        bucket, codec = self._bucket(flight.number)
        codec.decode(bucket, flight.outgoing, flight.tensors)
        self._pool.give_back(flight.outgoing, flight.incoming)


class StateByGradient(StepState):
    """The state of several codecs, each of which encodes some of the gradients."""

    def __init__(self, codecs: Mapping[int, StepState]) -> None:
        """Create the state.

        Args:
            codecs: index of a gradient -> what holds its state, which may hold that of others, too.
        """
        self._codecs = codecs
        self._holders = list(dict.fromkeys(codecs.values()))

    def state(self) -> dict[str, Tensor]:
        return {key: tensor for holder in self._holders for key, tensor in holder.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for holder in self._holders:
            holder.load_state({key: tensor for key, tensor in state.items() if self._of(key) in (holder, None)})

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last reduction; of several codecs, the largest of each figure."""
        figures: dict[str, float] = {}
        for holder in self._holders:
            figures |= {name: max(value, figures.get(name, value)) for name, value in holder.metrics().items()}
        return figures

    def _of(self, key: str) -> StepState | None:
        """Return what holds an entry of the state by the number of its gradient, as in 'residual.3'; None if no
        holder has the gradient."""
        number = key.rpartition(".")[2]
        return self._codecs.get(int(number)) if number.isdecimal() else None


@dataclass(frozen=True)
class _BucketInFlight:
    """A bucket whose all-to-all or all-gather has begun and not ended."""

    number: int
    """Number of the bucket, counted from 0 in each step."""
    tensors: list[Tensor]
    """The bucket's gradients."""
    outgoing: Tensor
    """[ranks, bytes of a part], uint8: the messages to all ranks; after the all-gather, the encoded sums of all parts.
    """
    incoming: Tensor
    """[ranks, bytes of a part], uint8: all ranks' messages about the part that this rank sums."""
    work: OverlappedWork
    """The collective that goes on: the all-to-all, then the all-gather."""
    part: Tensor | None = None
    """Encoded sums of this rank's part, kept in memory until they are sent; None before the all-gather."""


PIECE = 1 << 16
"""Count of numbers that are added up at a time, so that their fp32 sums stay in the L2 cache.

Adding up in pieces takes a third of the time that adding up whole parts takes.
"""


class Bf16BucketCodec(BucketCodec):
    """The codec of mode `bf16`: half the bytes of exact sums.

    Each number is rounded to bfloat16 (8 significant bits) before it is sent, and so is each sum.
    """

    part_multiple = 2

    def bytes_of(self, numbers: int) -> int:
        return 2 * numbers

    def encode(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        numbers = sum(tensor.numel() for tensor in tensors)
        flat = outgoing.flatten().view(torch.bfloat16)
        torch._foreach_copy_(unflatten_like(flat[:numbers], tensors), tensors)
        flat[numbers:] = 0

    def reduce_part(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        parts = incoming.view(torch.bfloat16)
        sums = torch.empty_like(parts[0])
        count = PIECE if incoming.device.type == "cpu" else max(1, len(sums))
        for start in range(0, len(sums), count):
            first, *others = parts[:, start : start + count]
            total = first.float()
            for other in others:
                total += other
            sums[start : start + count] = total
        return sums.view(torch.uint8)

    def decode(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        numbers = sum(tensor.numel() for tensor in tensors)
        flat = gathered.flatten().view(torch.bfloat16)
        torch._foreach_copy_(tensors, unflatten_like(flat[:numbers], tensors))
