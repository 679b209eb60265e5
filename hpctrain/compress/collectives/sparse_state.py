"""State of sparse sums: the step, the number of values to send of each tensor, and the residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.codecs.values import ValueCode
from hpctrain.compress.collectives.feedback import ErrorFeedback
from hpctrain.compress.collectives.reduce_scatter import Residuals, ResidualStats
from hpctrain.compress.select.selectors import seed_of, select_with_values
from hpctrain.compress.select.sparse_counts import SendCounts
from hpctrain.records.plan.compression import Selector

_STEP = "step"


class SparseSettings(NamedTuple):
    """How numbers are selected and encoded."""

    selector: Selector
    values: ValueCode

    def select(self, values: Tensor, k: int, step: int, tensor: int) -> tuple[Tensor, Tensor]:
        """Return the positions of about k values of a tensor, and copies of these values."""
        return select_with_values(values, k, self.selector, seed_of(step, tensor))


class SparseState(Residuals):
    """Step counter, send counts and residuals of a list of compressed tensors.

    A step in which a gradient is not finite on some rank does not count. The tensors of a sharded stage are summed part
    by part, each part once a step, in an order that is the same on all ranks.
    """

    def __init__(
        self, positions: Sequence[int], sizes: Sequence[int], counts: SendCounts, feedback: ErrorFeedback
    ) -> None:
        """
        Args:
            positions: number of each compressed tensor, under which the state holds its residual.
            sizes: count of numbers of each tensor.
            counts: decides how many numbers of each tensor a step sends.
            feedback: holds the residuals.
        """
        self.counts = counts
        self.feedback = feedback
        self.positions, self.sizes = list(positions), list(sizes)
        self._step = 0
        self._agreed = False
        self._under_way = False
        self._finite = True
        self._sent = self._of = 0
        self._square = 0.0
        """Squared norm of this rank's compressed gradients."""
        self.scratch = Scratch()

    def begin(self, device: torch.device) -> int:
        """Begin a step, or continue it; return its number, counted from 1.

        Collective in the first call after a start or load.
        """
        if not self._agreed:
            self._step = self.counts.agree(self._step, device)
            self._agreed = True
        if not self._under_way:
            self._under_way, self._finite = True, True
            self._sent, self._of, self._square = 0, 0, 0.0
        return self._step + 1

    def wanted(self, step: int, first: int, count: int) -> list[int] | None:
        """Return how many numbers to send of each of `count` tensors, from tensor `first` on; None: send everything."""
        counts = None if self.feedback.is_flush_step(step) else self.counts.of(step, self.sizes)
        return None if counts is None else counts[first : first + count]

    def record_sent(self, sent: int, of: int, square: float) -> None:
        """Record a part that was summed.

        Args:
            sent: count of numbers that this rank sent of the part's compressed tensors.
            of: count of all numbers of these tensors.
            square: squared norm of this rank's gradient of these tensors.
        """
        self._sent += sent
        self._of += of
        self._square += square

    def not_finite(self) -> None:
        """Record that a part was not summed, because its gradient is not finite on some rank."""
        self._finite = False

    def end_step(self, device: torch.device) -> None:
        """End a step, after all parts were summed. Collective in some steps."""
        if self._under_way and self._finite:
            self.counts.close(self._step + 1, self.sizes, device)
            self.count_step()
        self._under_way = False

    def count_step(self) -> None:
        """Count a step. Call it after its gradients were summed and `counts` was closed."""
        self._under_way = False
        self._step += 1
        self.feedback.end_step(self._step)

    def stats(self) -> ResidualStats:
        """Return the figures of the last step."""
        return ResidualStats(self._sent, self._of, self._square, self.feedback.norm() ** 2)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's state between steps, without a copy."""
        return {_STEP: torch.tensor(self._step), **self.feedback.state(), **self.counts.state(self.positions)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; missing entries start afresh.

        If ranks loaded different steps, the next step continues from the smallest.
        """
        self._step = int(state.get(_STEP, 0))
        self.feedback.load_state(state)
        self.counts.load_state(state, self.positions)
        self._agreed = self._under_way = False
