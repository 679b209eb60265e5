"""A reduce-scatter of the flat gradient of a part of a sharded stage, and where parameters stand in that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import HpctrainError


class ReduceScatter(Protocol):
    """A reduce-scatter."""

    def __call__(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> int:
        """Write the sum of this rank's part over the group. Collective over it.

        Args:
            output: [part], fp32.
            gradient: [world · part], fp32: the parts of all ranks one after the other; unchanged.

        Returns:
            Bytes this rank put on the wire.
        """


class ResidualStats(NamedTuple):
    """Of the last sums of a stage."""

    sent: int
    """Numbers that were chosen; 0 where nothing is chosen."""
    of: int
    """How many they were chosen from."""
    square: float
    """Squared norm of this rank's gradient."""
    kept: float
    """Squared norm of what it has not sent."""


class Residuals(Protocol):
    """What the reduce-scatters of a sharded stage have not sent yet, from one step to the next."""

    def end_step(self, device: torch.device) -> None:
        """All parts are summed. Collective in some steps."""

    def stats(self) -> ResidualStats:
        """Of the last step."""

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps; shared memory."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave; what is missing starts afresh."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter in the flat gradient of a part of a sharded stage."""

    name: str
    """In the stage, as 'layers.3.attention.wq.weight'."""
    shape: torch.Size
    """Before it is sharded."""
    owned: int
    """Numbers that each rank owns of it, zeros that fill it up included."""


class FlatGradientLayout:
    """Where the parameters of a part stand among those numbers of its flat gradient that a rank owns."""

    def __init__(self, pieces: Sequence[ShardedParameter], compressed: Sequence[int]) -> None:
        """
        Args:
            pieces: in the order in which they stand in the flat gradient.
            compressed: positions of those to compress, ascending; at least one.
        """
        starts = [0, *accumulate(piece.owned for piece in pieces)]
        stretches = list(pairwise(starts))
        self.numbers = starts[-1]
        """That each rank owns."""
        self.compressed = [stretches[index] for index in compressed]
        """Where each begins and ends."""
        self.exempt = [stretch for index, stretch in enumerate(stretches) if index not in frozenset(compressed)]
        """The same of those that are summed exactly."""
        self._names = ", ".join(piece.name for piece in pieces)

    def rows(self, gradient: Tensor, world: int) -> Tensor:
        """The flat gradient as [world, numbers], a row for each owner.

        Raises:
            HpctrainError: it is not of all of these parameters.
        """
        if gradient.numel() != world * self.numbers:
            raise HpctrainError(
                f"compression: found gradients of {gradient.numel()} numbers for {self._names}, which have "
                f"{world * self.numbers}; allowed: parameters that take part in every step; freeze those that do not, "
                "or use compression.mode none"
            )
        return gradient.view(world, -1)


def residual_metrics(stages: Sequence[Residuals]) -> dict[str, float]:
    """ResidualStats of the last step over the stages of a rank, as a reducer's `metrics` has them."""
    sent, of, square, kept = (sum(column) for column in zip(*(residuals.stats() for residuals in stages), strict=True))
    found = {"density": sent / of} if of else {}
    if 0 < square < math.inf:
        found["residual_norm_ratio"] = math.sqrt(kept / square)
    return found
