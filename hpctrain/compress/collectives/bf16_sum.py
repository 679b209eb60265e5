"""An all-reduce in bf16 whose rounding errors are all known: each to one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.collectives.exchange import all_gather
from hpctrain.compress.collectives.overlapped_work import OverlappedWork


class Bf16Sum:
    """A sum of fp32 numbers over the ranks, sent in bf16, half the bytes of fp32. It begins when it is created.

    Each rank adds up one part of the numbers in fp32 and sends the sums, rounded once more, to all ranks. All ranks
    get the same sums. A ring all-reduce in bf16 would round after each addition, and no rank would know those errors.
    """

    def __init__(self, numbers: Tensor, group: dist.ProcessGroup) -> None:
        """Round the numbers in place to what is sent, and start to send them. Collective over the group.

        Args:
            numbers: [n], fp32, contiguous; `finish` replaces it by the sums.
            group: the ranks.
        """
        self._numbers, self._group = numbers, group
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._part = -(-numbers.numel() // self._world)
        self._outgoing = numbers.new_zeros(self._world * self._part, dtype=torch.bfloat16)
        self._outgoing[: numbers.numel()] = numbers
        numbers.copy_(self._outgoing[: numbers.numel()])
        self._incoming = torch.empty_like(self._outgoing)
        work = dist.all_to_all_single(self._incoming, self._outgoing, group=group, async_op=True)
        self._work = OverlappedWork(work, numbers.device)

    def finish(self) -> tuple[int, Tensor]:
        """Wait for the sums, and write them to the numbers.

        Returns:
            The position of the first sum that this rank rounded, and the rounding errors of these sums: [m], fp32, each
            the sum before rounding − the sum after it.
        """
        with ACTIVITY.doing("all-to-all over dp, second factors", waits="dp"):
            self._work.wait()
        first, *others = self._incoming.view(self._world, self._part)
        total = first.float()
        for other in others:
            total += other
        sums = total.bfloat16()
        with ACTIVITY.doing("all-gather over dp, second factors", waits="dp"):
            all_gather(self._outgoing, sums, group=self._group)
        self._numbers.copy_(self._outgoing[: self._numbers.numel()])
        start = min(self._rank * self._part, self._numbers.numel())
        return start, total.sub_(sums)[: self._numbers.numel() - start]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in all."""
        return 2 * (self._world - 1) * self._part * self._outgoing.element_size()
