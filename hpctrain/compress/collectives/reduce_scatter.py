"""The interface of a reduce-scatter of a sharded stage's gradients, the layout of the flat gradient, and the
reduce-scatter without selection or residuals (`DenseReduceScatter`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import HpctrainError
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.collectives.overlapped_work import PendingWork, begin_all_to_all


class LevelBytes(NamedTuple):
    """Bytes that a rank sent to sum gradients, by level."""

    intra_node: int
    """To other replicas on its node."""
    inter_node: int
    """To other nodes."""


class StepState:
    """Base class of objects that may have state between steps, such as residuals.

    An object has no state unless its class overrides the methods, or sets `holder` to another object that holds the
    state.
    """

    holder: StepState | None = None
    """The object whose methods hold the state; None: this object has no state, or its class overrides the methods."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's state between steps, such as residuals: key -> tensor, not copied.

        The state of one gradient has a key with the kind of state and the number of the gradient in the list that
        `Reducer.reduce` gets, as 'residual.3'. With a sharded state, it is the number of the gradient among
        the compressed gradients of the stage or, with a codec of integers, the number of the `fully_shard` module.

        Raises:
            RuntimeError: with local SGD, a step followed the last outer sync.
        """
        return {} if self.holder is None else self.holder.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; entries that are missing start as in a new run.

        Raises:
            CheckpointError: a tensor has another shape than expected. Most classes raise this error only in the next
                reduction, which shows the sizes of the gradients.
        """
        if self.holder is not None:
            self.holder.load_state(state)

    def drop_state(self) -> None:
        """Drop all state, as in a new run. Either all ranks call it or none, because some state must be equal on all
        ranks.
        """
        if self.holder is None:
            self.load_state({})
        else:
            self.holder.drop_state()

    def metrics(self) -> dict[str, float]:
        """Return figures of the last reduction for `metrics.jsonl`: name -> value, as 'density'; empty if there are
        none.
        """
        return {} if self.holder is None else self.holder.metrics()


@dataclass(frozen=True)
class ScatterUnderWay:
    """A reduce-scatter whose messages are on their way."""

    sent_bytes: int
    """Bytes that this rank sends."""
    work: PendingWork
    """The collectives to wait for before `write_sums` is called."""
    write_sums: Callable[[Tensor], None]
    """Function that writes this rank's sums to the output, [part], fp32, and stores the next residuals, if there are
    any. Without collectives."""


class ReduceScatter(ABC):
    """Interface of a reduce-scatter of the flat gradient of one `fully_shard` module, in two halves, between which the
    rank may compute: the messages are on their way.

    All ranks begin reduce-scatters in one order. They end them in this order, too, but each rank when it likes to.
    Before the next one begins, `PendingWork.begin_last` of the one before must have been called.
    """

    residuals: Residuals | None = None
    """Residuals that the reduce-scatters of one stage share; None if the codec has none."""

    @abstractmethod
    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        """Encode a flat gradient and start to send it. Collective over the group.

        If the codec has residuals (`residuals`), the last reduce-scatter of this object must have ended. Residuals
        change only in `write_sums`: a reduce-scatter that never ends leaves them as they were.

        Args:
            gradient: [world · part], fp32; nobody writes to it before `write_sums` has returned.
            group: the ranks.

        Raises:
            HpctrainError, CheckpointError, RuntimeError: as of `__call__`.
        """

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        """Sum the gradients of all ranks, and write the part of the sum that this rank owns. Collective over the group.

        Args:
            output: [part], fp32; written to.
            gradient: [world · part], fp32: the parts that the ranks own, one after the other; unchanged.
            group: the ranks.

        Returns:
            Bytes that this rank sent.

        Raises:
            HpctrainError: the codec selects or quantises numbers, and the gradient lacks parameters of the module.
            CheckpointError: a loaded residual or variance profile is of another size.
            ValueError: with mode topk or adaptive, a message of another rank is about a gradient of another size.
            RuntimeError: a collective failed.
        """
        under_way = self.begin(gradient, group)
        under_way.work.wait()
        under_way.write_sums(output)
        return under_way.sent_bytes


class ResidualStats(NamedTuple):
    """Figures of a stage's last reduction: what this rank sent, and what is left in its residuals."""

    sent: int
    """Count of numbers that were selected and sent; 0 for a codec that sends all numbers."""
    of: int
    """Count of numbers from which the sent ones were selected; 0 for a codec that sends all numbers."""
    square: float
    """Squared L2 norm of this rank's gradient, over the compressed parameters."""
    residual_square: float
    """Squared L2 norm of this rank's residuals."""


class Residuals(StepState, ABC):
    """Residuals of a sharded stage's reduce-scatters, or of a reducer. They last from one step to the next."""

    def end_step(self, device: torch.device) -> None:
        """End a step after all its gradients were summed. Collective in the steps in which, with mode adaptive, ranks
        agree on new densities.

        Args:
            device: device of the gradients.
        """

    @abstractmethod
    def stats(self) -> ResidualStats:
        """Return what this rank sent in the last step, and what is left in its residuals."""

    def metrics(self) -> dict[str, float]:
        return residual_metrics([self])


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a `fully_shard` module, as it lies in the module's flat gradient. Each rank owns `owned` of its
    numbers, padding included."""

    name: str
    """Name within the stage, as 'layers.3.attention.wq.weight'."""
    shape: torch.Size
    """Shape before sharding."""
    owned: int
    """Count of its numbers that each rank owns, padding included."""


class FlatGradientLayout:
    """Layout of the flat gradient of a `fully_shard` module: the place of each parameter in the numbers that one rank
    owns.
    """

    def __init__(self, pieces: Sequence[ShardedParameter], compressed: Sequence[int]) -> None:
        """Compute where each parameter lies among the numbers that a rank owns.

        Args:
            pieces: the parameters, in the order of the flat gradient.
            compressed: indices in `pieces` of the parameters to compress, ascending; at least one.
        """
        starts = [0, *accumulate(piece.owned for piece in pieces)]
        stretches = list(pairwise(starts))
        self.numbers = starts[-1]
        """Count of numbers that each rank owns."""
        self.compressed = [stretches[index] for index in compressed]
        """Start and end of each compressed parameter among these numbers."""
        self.exempt = [stretch for index, stretch in enumerate(stretches) if index not in frozenset(compressed)]
        """Start and end of each parameter that is summed exactly, among these numbers."""
        self._names = ", ".join(piece.name for piece in pieces)

    def rows(self, gradient: Tensor, world: int) -> Tensor:
        """Return the flat gradient as [world, numbers]: row i holds the numbers that rank i owns.

        Raises:
            HpctrainError: the gradient does not hold all parameters of the layout.
        """
        if gradient.numel() != world * self.numbers:
            raise HpctrainError(
                f"compression: found gradients of {gradient.numel()} numbers for {self._names}, which have "
                f"{world * self.numbers}; allowed: parameters that take part in every step; freeze those that do not, "
                "or use compression.mode none"
            )
        return gradient.view(world, -1)


def residual_metrics(stages: Sequence[Residuals]) -> dict[str, float]:
    """Return `density` and `residual_norm_ratio` of a rank's last step, over the residuals of all its stages.

    A figure is left out if it does not apply: `density` if all numbers are sent, the ratio if the gradient is zero or
    not finite.
    """
    total = ResidualStats(*map(sum, zip(*(residuals.stats() for residuals in stages), strict=True)))
    metrics = {"density": total.sent / total.of} if total.of else {}
    if 0 < total.square < math.inf:
        metrics["residual_norm_ratio"] = math.sqrt(total.residual_square / total.square)
    return metrics


def residuals_of(scatters: Sequence[ReduceScatter | None]) -> Residuals | None:
    """Return the residuals that the reduce-scatters of a stage share; None if the codec has none."""
    return next((scatter.residuals for scatter in scatters if scatter is not None and scatter.residuals), None)


class DenseReduceScatter(ReduceScatter):
    """Reduce-scatter that sends every number once, in fp32 or bf16, straight to the rank that owns its sum.

    The owner adds up in fp32, in an order that never changes. gloo's own reduce-scatter is an all-reduce after which
    each rank keeps its part: it sends twice as much, and every rank adds up everything.
    """

    def __init__(self, wire_dtype: torch.dtype = torch.float32, pool: BufferPool | None = None) -> None:
        """Create the reduce-scatter.

        Args:
            wire_dtype: dtype of the numbers in messages.
            pool: memory of messages; None: a pool of its own.
        """
        self._wire_dtype = wire_dtype
        self._pool = pool or BufferPool(bounded=True)

    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        world = dist.get_world_size(group)
        incoming = self._pool.take(gradient.numel(), gradient, self._wire_dtype)
        outgoing, buffers = gradient, [incoming]
        if self._wire_dtype != gradient.dtype:
            outgoing = self._pool.take(gradient.numel(), gradient, self._wire_dtype).copy_(gradient)
            buffers.append(outgoing)
        work = begin_all_to_all(incoming, outgoing, group)
        sent_bytes = outgoing.nbytes // world * (world - 1)
        return ScatterUnderWay(sent_bytes, work, partial(self._add_up, incoming.view(world, -1), buffers))

    def _add_up(self, incoming: Tensor, buffers: list[Tensor], output: Tensor) -> None:
        torch.sum(incoming, 0, dtype=output.dtype, out=output)
        self._pool.give_back(*buffers)
