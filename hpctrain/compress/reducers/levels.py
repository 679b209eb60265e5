"""Sums of gradients by level: the replicas of a node sum first, each gets the sums of a part, and the nodes sum these
parts with a codec. So a node sends as many bytes as if it had one replica.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.collectives.exchange import all_gather
from hpctrain.compress.collectives.overlapped_work import OverlappedWork
from hpctrain.compress.collectives.reduce_scatter import LevelBytes
from hpctrain.compress.reducers.bucket_scheduler import BucketScheduler
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.records.plan.compression import BUCKET_BYTES
from hpctrain.records.plan.levels import part_shape

MESSAGES_IN_FLIGHT = 2
"""Largest count of buckets on their way between the replicas of a node at a time."""


class NodeLevel(ABC):
    """Interface of the level within nodes: how the replicas of a node come to the sums of parts, and from these to the
    sums of whole gradients."""

    @abstractmethod
    def scatter(self, gradients: list[Tensor]) -> tuple[list[Tensor], int]:
        """Return the sums over the replicas of a node of this rank's part of each gradient, and the bytes that this
        rank sent. Collective over the replicas of a node.

        Raises:
            RuntimeError: a collective failed; or after `overlap`, the backward pass added to a gradient after it was
                sent.
        """

    def gather(self, gradients: list[Tensor]) -> int:
        """Replace each gradient by the parts of all replicas of the node, as they now are in the tensors that `scatter`
        returned. Return the bytes that this rank sent. Collective over the replicas of a node.

        Raises:
            RuntimeError: a collective failed.
        """
        return 0

    @abstractmethod
    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, hooks: bool, between: Reducer
    ) -> None:
        """Send gradients within the node before `scatter`, as `Reducer.overlap` describes, and pass the sums of parts
        on to `between` as soon as they are there.

        Args:
            between: the reducer that sums the parts over the nodes.
        """

    @abstractmethod
    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        """As `Reducer.group_done`."""

    @abstractmethod
    def defer(self, deferred: bool) -> None:
        """As `Reducer.defer`."""

    def proceed(self) -> None:  # noqa: B027
        """As `Reducer.proceed`."""


class LevelReducer(Reducer):
    """Reducer that sums within nodes first, and then between nodes, by another reducer."""

    def __init__(self, within: NodeLevel, between: Reducer) -> None:
        """Create the reducer before the first step.

        Args:
            within: sums among the replicas of a node.
            between: sums the parts over the nodes.
        """
        self._within = within
        self._between = self.holder = between

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None = None, hooks: bool = True
    ) -> None:
        self._within.overlap(parameters, groups, hooks, self._between)

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        self._within.group_done(number, gradients)

    def proceed(self) -> None:
        self._within.proceed()
        self._between.proceed()

    def defer(self, deferred: bool) -> None:
        self._within.defer(deferred)

    def reduce(self, gradients: list[Tensor]) -> int:
        parts, within_bytes = self._within.scatter(gradients)
        between_bytes = self._between.reduce(parts)
        within_bytes += self._within.gather(gradients)
        self.level_bytes = LevelBytes(within_bytes, between_bytes)
        return within_bytes + between_bytes

    def after_step(self, step: int) -> int:
        return self._between.after_step(step)

    def before_checkpoint(self) -> None:
        self._between.before_checkpoint()


class ReplicatedNodeLevel(NodeLevel):
    """The level within nodes for replicas that each hold the whole state.

    Every gradient is cut along its first dimension into one part for each replica of the node, padded with zeros
    at the end, as `fully_shard` cuts parameters. In an all-to-all each rank sends every other rank that rank's part.
    Each rank adds up in fp32 what it receives. At k ranks, a rank sends (k−1)/k of its gradients, and as much in the
    all-gather of the sums.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Create the level before the first step.

        Args:
            group: the replicas of this node.
            shapes: shapes of the gradients.
            dtype: dtype of the numbers in messages; None: that of the gradients.
            bucket_bytes: largest size of a bucket.
        """
        self._group = group
        self._world = dist.get_world_size(group)
        self.part_shapes = [torch.Size(part_shape(shape, self._world)) for shape in shapes]
        """Shapes of this rank's parts of the gradients, padding included."""
        self._dtype = dtype
        self._scheduler = BucketScheduler(self._send, bucket_bytes, self._make_room)
        self._between: Reducer | None = None
        """The reducer that gets the sums of parts before `scatter` ends; None before `overlap`."""
        self._parts: dict[int, Tensor] = {}
        """Number of a bucket -> sums of this rank's parts of its gradients, one after the other."""
        self._in_flight: list[_NodeMessages] = []
        self._pool = BufferPool()
        self._sent_bytes = 0

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, hooks: bool, between: Reducer
    ) -> None:
        self._scheduler.overlap(parameters, groups, hooks)
        self._between = between
        parts = [tensor.new_empty(shape) for tensor, shape in zip(parameters, self.part_shapes, strict=True)]
        between.overlap(parts, self._scheduler.buckets, hooks=False)

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        self._scheduler.group_done(number, gradients)

    def defer(self, deferred: bool) -> None:
        self._scheduler.is_deferred = deferred

    def proceed(self) -> None:
        while self._in_flight and self._in_flight[0].work.has_ended:
            self._add_up()
        self._scheduler.proceed()

    def scatter(self, gradients: list[Tensor]) -> tuple[list[Tensor], int]:
        self._scheduler.send_remaining(gradients)
        while self._in_flight:
            self._add_up()
        parts = list(gradients)
        for number, bucket in enumerate(self._scheduler.buckets):
            for index, part in zip(bucket, self._parts_of(number), strict=True):
                parts[index] = part
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return parts, sent_bytes

    def gather(self, gradients: list[Tensor]) -> int:
        for number, bucket in enumerate(self._scheduler.buckets):
            while len(self._in_flight) >= MESSAGES_IN_FLIGHT:
                self._copy_back()
            tensors = [gradients[index] for index in bucket]
            part = self._parts[number].to(self._dtype or tensors[0].dtype)
            whole = self._pool.take(self._world * part.numel(), part, part.dtype)
            work = all_gather(whole, part, group=self._group, async_op=True)
            self._in_flight.append(_NodeMessages(number, tensors, part, whole, OverlappedWork(work, part.device)))
            self._sent_bytes += (self._world - 1) * part.nbytes
        while self._in_flight:
            self._copy_back()
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return sent_bytes

    def _make_room(self, wait: bool = False) -> bool:
        """Add up the oldest buckets until another one may be sent; return whether it may.

        Args:
            wait: whether to wait for other ranks.
        """
        while len(self._in_flight) >= MESSAGES_IN_FLIGHT:
            if not (wait or self._in_flight[0].work.has_ended):
                return False
            self._add_up()
        return True

    def _send(self, number: int, tensors: list[Tensor]) -> None:
        """Start the all-to-all of a bucket.

        Args:
            number: number of the bucket, counted from 0 in each step.
            tensors: the bucket's gradients.
        """
        self._make_room(wait=True)
        dtype = self._dtype or tensors[0].dtype
        sizes = [math.prod(self.part_shapes[index]) for index in self._scheduler.buckets[number]]
        outgoing, incoming = (self._pool.take(self._world * sum(sizes), tensors[0], dtype) for _ in range(2))
        for columns, tensor in zip(outgoing.view(self._world, -1).split(sizes, 1), tensors, strict=True):
            _cut(tensor, columns)
        work = dist.all_to_all_single(incoming, outgoing, group=self._group, async_op=True)
        overlapped = OverlappedWork(work, incoming.device)
        self._in_flight.append(_NodeMessages(number, tensors, outgoing, incoming, overlapped))
        self._sent_bytes += (self._world - 1) * outgoing.nbytes // self._world

    def _add_up(self) -> None:
        """Wait for the oldest all-to-all, and add up this rank's parts of the bucket's gradients."""
        flight = self._in_flight.pop(0)
        with ACTIVITY.doing(f"all-to-all over dp, within the node, bucket {flight.number}", waits="dp"):
            flight.work.wait()
        messages = flight.incoming.view(self._world, -1)
        if flight.number not in self._parts:
            self._parts[flight.number] = flight.tensors[0].new_empty(messages.shape[1])
        torch.sum(messages, 0, dtype=flight.tensors[0].dtype, out=self._parts[flight.number])
        self._pool.give_back(flight.outgoing, flight.incoming)
        if self._between is not None:
            self._between.group_done(flight.number, self._parts_of(flight.number))

    def _copy_back(self) -> None:
        """Wait for the oldest all-gather, and copy the sums to the gradients."""
        flight = self._in_flight.pop(0)
        with ACTIVITY.doing(f"all-gather over dp, within the node, bucket {flight.number}", waits="dp"):
            flight.work.wait()
        rows = flight.incoming.view(self._world, -1)
        for columns, tensor in zip(self._split(flight.number, rows), flight.tensors, strict=True):
            _join(columns, tensor)
        self._pool.give_back(flight.incoming)

    def _parts_of(self, number: int) -> list[Tensor]:
        """Return the sums of this rank's parts of the gradients of bucket `number`, as views in their shapes."""
        shapes = [self.part_shapes[index] for index in self._scheduler.buckets[number]]
        columns = self._split(number, self._parts[number])
        return [part.view(shape) for part, shape in zip(columns, shapes, strict=True)]

    def _split(self, number: int, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each gradient in `numbers`, [..., numbers of this rank's parts of bucket `number`]."""
        sizes = [math.prod(self.part_shapes[index]) for index in self._scheduler.buckets[number]]
        return numbers.split(sizes, -1)


def _cut(tensor: Tensor, columns: Tensor) -> None:
    """Write a gradient to `columns`, [ranks, numbers of a part]: row i is the part of rank i, with zeros after the
    last number."""
    ranks, numbers = columns.shape
    for part, row in enumerate(columns):
        stretch = _rows(tensor, part, ranks)
        row[: stretch.numel()].view(stretch.shape).copy_(stretch)
        row[stretch.numel() : numbers] = 0


def _join(columns: Tensor, tensor: Tensor) -> None:
    """Write the parts of all ranks in `columns`, [ranks, numbers of a part], back to a gradient."""
    for part, row in enumerate(columns):
        stretch = _rows(tensor, part, len(columns))
        stretch.copy_(row[: stretch.numel()].view(stretch.shape))


def _rows(tensor: Tensor, part: int, ranks: int) -> Tensor:
    """Return part number `part` of a gradient, as a view; it has fewer rows, or none, at the end of the gradient."""
    whole = tensor if tensor.dim() else tensor.view(1)
    rows = -(-len(whole) // ranks)
    return whole[part * rows : (part + 1) * rows]


@dataclass(frozen=True)
class _NodeMessages:
    """A bucket whose all-to-all or all-gather within the node has begun and not ended."""

    number: int
    """Number of the bucket, counted from 0 in each step."""
    tensors: list[Tensor]
    """The bucket's gradients."""
    outgoing: Tensor
    """What this rank sends: [ranks · numbers of a part] in the all-to-all, [numbers of a part] in the all-gather."""
    incoming: Tensor
    """What this rank receives: [ranks · numbers of a part]."""
    work: OverlappedWork
    """The collective, which may still run."""
