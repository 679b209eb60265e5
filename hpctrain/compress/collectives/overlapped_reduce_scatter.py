"""A reduce-scatter of a sharded stage's gradients that goes on while the rank computes, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import HpctrainError
from hpctrain.compress.collectives.overlapped_work import OverlappedWork
from hpctrain.compress.collectives.reduce_scatter import ReduceScatter

SUMS_IN_FLIGHT = 2
"""Largest count of a stage's reduce-scatters whose messages are on their way at a time."""


class SumsInFlight:
    """The reduce-scatters of a stage that this rank has begun and not ended, oldest first."""

    def __init__(self, operation: str) -> None:
        """Create the list before the first step.

        Args:
            operation: text that `ACTIVITY` records while the rank waits for one of them.
        """
        self._operation = operation
        self._queue: list[_SumInFlight] = []
        self._sums: dict[OverlappedReduceScatter, Tensor] = {}
        """Reduce-scatter of a module -> where the step's sums of its gradients are added up, [part]."""

    def begin(
        self, scatter: OverlappedReduceScatter, output: Tensor, outgoing: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Start to send the parts of a gradient to their owners; wait for the oldest ones if too many are on their way.

        torch makes the module's first output of a step the gradient, and adds further outputs to it at once. So the
        first output gets all sums, later, and further ones are zeros.

        Args:
            output: [part], fp32.
            outgoing: [world · part]: the parts for all ranks, which nobody else writes to.

        Raises:
            HpctrainError: a parameter of the module took part in some micro-batches only.
        """
        sums = self._sums.setdefault(scatter, output)
        if sums.numel() != output.numel():
            raise HpctrainError(
                f"{self._operation}: found a gradient of {output.numel()} numbers, in an earlier micro-batch one of "
                f"{sums.numel()}; allowed: parameters that take part in every micro-batch"
            )
        while len(self._queue) >= SUMS_IN_FLIGHT:
            self._add_up()
        incoming = torch.empty_like(outgoing)
        work = dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)
        output.zero_()
        rows = incoming.view(dist.get_world_size(group), -1)
        self._queue.append(_SumInFlight(sums, outgoing, rows, OverlappedWork(work, output.device)))

    def proceed(self) -> None:
        """Add up what has arrived, without waiting for other ranks."""
        while self._queue and self._queue[0].work.has_ended:
            self._add_up()

    def finish(self) -> None:
        """Wait for all sums of a step; the gradients are complete then.

        Raises:
            RuntimeError: a collective failed.
        """
        while self._queue:
            self._add_up()
        self._sums.clear()

    def _add_up(self) -> None:
        flight = self._queue.pop(0)
        with ACTIVITY.doing(self._operation, waits="dp"):
            flight.work.wait()
        flight.sums.add_(flight.incoming.sum(0, dtype=flight.sums.dtype))


class OverlappedReduceScatter(ReduceScatter):
    """As `DenseReduceScatter`, for one module on a CPU, but with the sums in the output only after
    `SumsInFlight.finish`. Until then, the messages take the memory of the flat gradient twice.
    """

    def __init__(self, in_flight: SumsInFlight, wire_dtype: torch.dtype = torch.float32) -> None:
        self._in_flight, self._wire_dtype = in_flight, wire_dtype

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        outgoing = gradient.to(self._wire_dtype)
        self._in_flight.begin(self, output, outgoing, group)
        world = dist.get_world_size(group)
        return outgoing.nbytes // world * (world - 1)


@dataclass(frozen=True)
class _SumInFlight:
    """A reduce-scatter whose messages are on their way."""

    sums: Tensor
    """[part]: where this rank's sums are added."""
    outgoing: Tensor
    """What this rank sends, which has to stay in memory until the end."""
    incoming: Tensor
    """[world, part]: what this rank receives."""
    work: OverlappedWork
