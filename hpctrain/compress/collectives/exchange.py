"""All-gather and all-to-all of messages of unequal size: ranks send sizes first, then bytes.

Also cuts tensors into one part per rank, so that a rank sends about equally many numbers of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.collectives.overlapped_work import PendingWork, begin_all_to_all

# torch 2.13 warns about the old name; torch 2.12 does not have the new one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of messages of equal size, called with (output [world · n], input [n], group, async_op) as
`torch.distributed.all_gather_into_tensor`.
"""


_SIZE_BYTES = 8


def balanced_borders(loads: Sequence[int], sizes: Sequence[int], world: int) -> list[int]:
    """Return the borders that cut a list of concatenated tensors into one part per rank, with equal loads.

    The load of a tensor counts as evenly distributed over its numbers. If all loads are 0, the parts have equal sizes.

    Args:
        loads: for each tensor, how many of its numbers are expected to be sent.
        sizes: for each tensor, its count of numbers.
        world: number of ranks.

    Returns:
        The world + 1 borders, as ascending positions in the concatenated tensors, from 0 to the sum of the sizes.
    """
    if not sum(loads):
        loads = sizes
    ends = list(accumulate(loads))
    borders = [0]
    tensor, before = 0, 0
    for part in range(1, world):
        # The target is an integer, so that all ranks cut at the same position.
        target = part * ends[-1] // world
        while ends[tensor] < target:
            before += sizes[tensor]
            tensor += 1
        within = target - (ends[tensor] - loads[tensor])
        borders.append(before + within * sizes[tensor] // max(1, loads[tensor]))
    return [*borders, sum(sizes)]


def counts_between(positions: Tensor, borders: Sequence[int]) -> list[int]:
    """Return how many of the ascending positions lie between each border (included) and the next (excluded)."""
    counts: list[int] = torch.searchsorted(positions, torch.tensor(borders, device=positions.device)).diff().tolist()
    return counts


class Exchange(PendingWork):
    """An all-to-all of messages of unequal size that this rank has begun: the sizes are on their way, then the
    messages.

    A rank can begin to send messages only when it knows the sizes of those that it gets. It does so in `begin_last` or
    `wait`, and not when the sizes arrive: other collectives of the group would then begin before it on some ranks, and
    after it on others.
    """

    def __init__(self, messages: list[Tensor], group: dist.ProcessGroup) -> None:
        """Begin to send the sizes. Collective over the group.

        Args:
            messages: uint8, by receiving rank; the message to this rank itself may be empty.
            group: the ranks.
        """
        self._group = group
        self._outgoing = torch.cat(messages)
        self._sizes = [message.numel() for message in messages]
        there = torch.tensor(self._sizes, dtype=torch.int64, device=self._outgoing.device)
        self._sizes_here = torch.empty_like(there)
        self._work = begin_all_to_all(self._sizes_here, there, group)
        self._received: list[Tensor] | None = None
        self.sent_bytes = sum(self._sizes) - self._sizes[dist.get_rank(group)] + (len(messages) - 1) * _SIZE_BYTES
        """Bytes that this rank sends to others."""

    @property
    def has_ended(self) -> bool:
        return self._received is not None and self._work.has_ended

    def begin_last(self) -> None:
        if self._received is None:
            self._work.wait()
            expected: list[int] = self._sizes_here.tolist()
            incoming = self._outgoing.new_empty(sum(expected))
            self._work = begin_all_to_all(incoming, self._outgoing, self._group, expected, self._sizes)
            self._received = list(incoming.split(expected))

    def wait(self) -> None:
        self.begin_last()
        self._work.wait()

    def messages(self) -> list[Tensor]:
        """Return the received messages, by sending rank, after a call of `wait`."""
        assert self._received is not None, "`wait` receives them"
        return self._received


def exchange(messages: list[Tensor], group: dist.ProcessGroup) -> tuple[list[Tensor], int]:
    """Send each rank its message and receive the messages of all ranks: an all-to-all. Collective over the group.

    Args:
        messages: uint8, by receiving rank; the message to this rank itself may be empty.
        group: the ranks.

    Returns:
        The received messages, by sending rank, and the bytes that this rank sent to others.
    """
    under_way = Exchange(messages, group)
    with ACTIVITY.doing("all-to-all over dp, sparse", waits="dp"):
        under_way.wait()
    return under_way.messages(), under_way.sent_bytes


def gather(message: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], int]:
    """Send one message to all ranks and receive their messages: an all-gather. Collective over the group.

    Args:
        message: uint8.
        group: the ranks.

    Returns:
        The messages by sending rank, and the bytes that this rank sent, padding included. On the wire, all messages are
        padded to the length of the largest.
    """
    world = dist.get_world_size(group)
    size = torch.tensor([message.numel()], dtype=torch.int64, device=message.device)
    sizes = size.new_empty(world)
    with ACTIVITY.doing("all-gather over dp, sizes", waits="dp"):
        all_gather(sizes, size, group=group)
    expected: list[int] = sizes.tolist()
    largest = max(expected)
    filled = torch.cat([message, message.new_zeros(largest - message.numel())])
    incoming = message.new_empty(world * largest)
    with ACTIVITY.doing("all-gather over dp, sparse", waits="dp"):
        all_gather(incoming, filled, group=group)
    messages = [part[:bytes_] for part, bytes_ in zip(incoming.split(largest), expected, strict=True)]
    return messages, (world - 1) * (largest + _SIZE_BYTES)
