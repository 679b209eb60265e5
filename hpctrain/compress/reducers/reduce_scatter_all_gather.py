"""Dense sums in fewer bytes than fp32 has: each rank adds up a part of every bucket and sends the sums to everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.collectives.gathering import all_gather
from hpctrain.compress.reducers.bucket_scheduler import Departures
from hpctrain.compress.reducers.reducer import DenseReducer
from hpctrain.records.plan.codec import BUCKET_BYTES

SCATTERED = 2
"""Buckets that are handed out before the first of them is added up: of those behind it one is always on the wire."""
IN_FLIGHT = 4
"""Buckets whose memory is in use at a time."""


class Wire(Protocol):
    """How a bucket is written, in as many parts as there are ranks."""

    granule: int
    """A part is a multiple of so many numbers."""

    def bytes_of(self, numbers: int) -> int:
        """Length of a part's message, a multiple of 4."""

    def write(self, bucket: Sequence[int], tensors: list[Tensor], outgoing: Tensor) -> None:
        """Write the gradients of a bucket, one after the other and filled up with zeros.

        Args:
            bucket: their positions among those that are compressed; in every step the same.
            tensors: the gradients, fp32.
            outgoing: [ranks, bytes of a part], uint8.
        """

    def add_up(self, bucket: Sequence[int], incoming: Tensor, rank: int) -> Tensor:
        """The sums of this rank's part as a message, in memory of its own: [bytes of a part], uint8.

        Args:
            incoming: [ranks, bytes of a part], uint8: everybody's message of it.
            rank: of this one in its group, and so which part it is.
        """

    def read(self, bucket: Sequence[int], gathered: Tensor, tensors: list[Tensor]) -> None:
        """Replace the gradients of a bucket by their sums.

        Args:
            gathered: [ranks, bytes of a part], uint8: the sums of all parts; the same on every rank.
        """

    def state(self) -> dict[str, Tensor]:
        """As `Reducer.state`, by position among the gradients that are compressed."""

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def drop_state(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class OwnerReducer:
    """Sums of which each rank owns a part of every bucket.

    A bucket goes as an all-to-all, in which each rank gets its part of everybody's gradient and adds it up in fp32,
    and an all-gather of the sums: as many messages of the same size as those of a ring all-reduce, which would round
    after every addition. All ranks read the same bytes, so they have the same sums.
    """

    def __init__(
        self, group: dist.ProcessGroup, chosen: Sequence[int], wire: Wire, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """
        Args:
            group: the replicas.
            chosen: positions in the list of gradients of those that travel on the wire; others are summed exactly.
            wire: how numbers are written.
            bucket_bytes: of gradients that go together.
        """
        self._group = group
        self._chosen = list(chosen)
        self._wire = wire
        self._rest = DenseReducer(group)
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._departures = Departures(self._send, bucket_bytes)
        self._scattered: list[_Flight] = []
        self._gathered: list[_Flight] = []
        self._spare: list[Tensor] = []
        self._sent_bytes = 0

    def overlap(self, parameters: list[nn.Parameter]) -> None:
        """From the second step on, send a bucket as soon as the backward pass has finished its gradients.

        Call it once, with plain parameters in the order in which `reduce` gets their gradients, and only where nothing
        else is sent during the backward pass, and nothing changes gradients between it and `reduce`.
        """
        if self._world > 1:
            self._departures.listen([parameters[index] for index in self._chosen])

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        apart = set(self._chosen)
        self._departures.complete([gradients[index] for index in self._chosen])
        self._rest.begin([gradient for index, gradient in enumerate(gradients) if index not in apart])
        while self._scattered:
            self._add_up()
        while self._gathered:
            self._bring_home()
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return sent_bytes + self._rest.finish()

    def state(self) -> dict[str, Tensor]:
        return self._wire.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._wire.load_state(state)

    def drop_state(self) -> None:
        self._wire.drop_state()

    def metrics(self) -> dict[str, float]:
        return self._wire.metrics()

    def _send(self, number: int, tensors: list[Tensor]) -> None:
        """Hand out a bucket; then add up an earlier one. On all ranks alike, so their collectives keep one order."""
        while len(self._scattered) + len(self._gathered) >= IN_FLIGHT:
            self._bring_home()
        numbers = sum(tensor.numel() for tensor in tensors)
        granule = self._world * self._wire.granule
        part_bytes = self._wire.bytes_of(-(-numbers // granule) * self._wire.granule)
        outgoing, incoming = self._memory(part_bytes, tensors[0]), self._memory(part_bytes, tensors[0])
        self._wire.write(self._departures.buckets[number], tensors, outgoing)
        work = dist.all_to_all_single(incoming.flatten(), outgoing.flatten(), group=self._group, async_op=True)
        self._scattered.append(_Flight(number, tensors, outgoing, incoming, work))
        self._sent_bytes += 2 * (self._world - 1) * part_bytes
        if len(self._scattered) > SCATTERED:
            self._add_up()

    def _add_up(self) -> None:
        """Add up this rank's part of what was handed out first, and begin to send it to everybody."""
        flight = self._scattered.pop(0)
        with ACTIVITY.doing(f"all-to-all over dp, bucket {flight.number}", waits=True):
            flight.work.wait()
        part = self._wire.add_up(self._departures.buckets[flight.number], flight.incoming, self._rank)
        work = all_gather(flight.outgoing.flatten(), part, group=self._group, async_op=True)
        self._gathered.append(_Flight(flight.number, flight.tensors, flight.outgoing, flight.incoming, work, part))

    def _bring_home(self) -> None:
        flight = self._gathered.pop(0)
        with ACTIVITY.doing(f"all-gather over dp, bucket {flight.number}", waits=True):
            flight.work.wait()
        self._wire.read(self._departures.buckets[flight.number], flight.outgoing, flight.tensors)
        self._spare += [flight.outgoing, flight.incoming]

    def _memory(self, part_bytes: int, like: Tensor) -> Tensor:
        """Kept memory, because fresh pages cost more than what is written to them."""
        for index, spare in enumerate(self._spare):
            if spare.untyped_storage().nbytes() >= self._world * part_bytes:
                return self._spare.pop(index).as_strided((self._world, part_bytes), (part_bytes, 1))
        return like.new_empty(self._world, part_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class _Flight:
    """A bucket on the wire."""

    number: int
    tensors: list[Tensor]
    outgoing: Tensor
    """What was handed out; once gathered, the sums of all parts."""
    incoming: Tensor
    work: dist.Work
    part: Tensor | None = None
    """This rank's sums, which must live until they are sent."""
