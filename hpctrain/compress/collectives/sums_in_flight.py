"""Reduce-scatters of sharded gradients that go on while the rank computes, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.collectives.reduce_scatter import ReduceScatter, ScatterUnderWay

SUMS_IN_FLIGHT = 2
"""Largest count of a rank's reduce-scatters whose messages are on their way at a time."""


class SumsInFlight:
    """The reduce-scatters of all stages of a rank that the rank has begun and not ended, oldest first.

    As a context manager, it waits for all sums at the end of the block, and drops them if the block raises an error.
    """

    def __init__(self) -> None:
        self._queue: list[_SumInFlight] = []
        self._sums: dict[ReduceScatter, Tensor] = {}
        """Reduce-scatter of a module -> where the step's sums of its gradients are added up, [part]."""
        self._incomplete: set[ReduceScatter] = set()
        """Reduce-scatters whose gradient lacked parameters in this step."""
        self._later = Scratch()
        """Memory for the sums of a micro-batch that is not the first one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._drop()

    def begin(
        self,
        scatter: ReduceScatter,
        output: Tensor,
        gradient: Tensor,
        group: ProcessGroup,
        operation: str,
        complete: bool = True,
        ended: Callable[[], None] | None = None,
    ) -> int:
        """Begin a reduce-scatter of a `fully_shard` module; return the bytes that this rank sends. First, wait for the
        oldest reduce-scatters if too many are on their way.

        torch makes the module's first output of a step the gradient, and adds further outputs to it at once. So the
        first output later gets the sums of all micro-batches, and further outputs stay zeros. Of a gradient that lacks
        parameters, only torch knows which ones: the rank then waits for the sum, and for further ones of the module.

        Args:
            scatter: the reduce-scatter of this module alone.
            output: [part], fp32; zeros until the sum has ended.
            gradient: as of `ReduceScatter.begin`.
            group: the ranks.
            operation: text that `ACTIVITY` records while the rank waits for the messages.
            complete: whether the gradient has all parameters of the module.
            ended: called when the sum has ended and is added to those of earlier micro-batches; not called if the rank
                waits for the sum here.

        Raises:
            HpctrainError: the codec selects or quantises numbers, and the gradient lacks parameters of the module.
            CheckpointError: a loaded residual is of another size.
            RuntimeError: a collective failed.
        """
        if not complete or scatter in self._incomplete:
            self._incomplete.add(scatter)
            self.wait()
            with ACTIVITY.doing(operation, waits="dp"):
                return scatter(output, gradient, group)
        if self._queue:
            with ACTIVITY.doing(self._queue[-1].operation, waits="dp"):
                self._queue[-1].under_way.work.begin_last()
        while len(self._queue) >= SUMS_IN_FLIGHT or self._needs_residual(scatter):
            self._end_oldest()
        sums = self._sums.setdefault(scatter, output)
        under_way = scatter.begin(gradient, group)
        output.zero_()
        self._queue.append(_SumInFlight(scatter, sums, output is sums, under_way, operation, ended))
        return under_way.sent_bytes

    def proceed(self) -> None:
        """Add up what has arrived, without waiting for other ranks.

        Raises:
            RuntimeError: a collective failed.
        """
        while self._queue and self._queue[0].under_way.work.has_ended:
            self._end_oldest()

    def wait(self) -> None:
        """Wait for all sums that have begun; the gradients are complete then, except for micro-batches still to come.

        Raises:
            RuntimeError: a collective failed.
        """
        while self._queue:
            self._end_oldest()

    def finish(self) -> None:
        """Wait for all sums of a step. After an error, the other sums are dropped.

        Raises:
            RuntimeError: a collective failed.
        """
        try:
            self.wait()
        finally:
            self._drop()

    def _drop(self) -> None:
        """Forget all sums. Residuals stay as they were before those that have not ended."""
        self._queue.clear()
        self._sums.clear()
        self._incomplete.clear()

    def _needs_residual(self, scatter: ReduceScatter) -> bool:
        """Return whether the reduce-scatter can begin only when its last one has ended, which until then uses the
        buffer of the residual."""
        return scatter.residuals is not None and any(flight.scatter is scatter for flight in self._queue)

    def _end_oldest(self) -> None:
        flight = self._queue.pop(0)
        with ACTIVITY.doing(flight.operation, waits="dp"):
            flight.under_way.work.wait()
        output = flight.sums if flight.is_first else self._later.take(tuple(flight.sums.shape), flight.sums)
        flight.under_way.write_sums(output)
        if not flight.is_first:
            flight.sums.add_(output)
        if flight.ended is not None:
            flight.ended()


@dataclass(frozen=True)
class _SumInFlight:
    """A reduce-scatter whose messages are on their way."""

    scatter: ReduceScatter
    sums: Tensor
    """[part]: where the sums of the step's micro-batches are added up."""
    is_first: bool
    """Whether this is the step's first micro-batch."""
    under_way: ScatterUnderWay
    operation: str
    """What `ACTIVITY` records while the rank waits."""
    ended: Callable[[], None] | None
    """Function to call when the sum has ended."""
