"""The state that all sparse reduce-scatters of a sharded stage share: the step, the number of values that it sends of
each tensor, and the residuals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.compress.collectives.feedback import ErrorFeedback
from hpctrain.compress.collectives.reduce_scatter import ResidualStats
from hpctrain.compress.select.sparse_counts import SendCounts

_STEP = "step"


class SparseScatterState:
    """Step counter, send counts and residuals of a stage.

    Each part of the stage is summed once per step, in an order that is the same on all ranks. A step in which a part's
    gradient is not finite on some rank does not count.
    """

    def __init__(self, sizes: Sequence[int], counts: SendCounts, feedback: ErrorFeedback) -> None:
        """
        Args:
            sizes: numbers of each compressed tensor, part after part.
            counts: how many numbers of each tensor a step sends.
            feedback: holds the residuals.
        """
        self.counts = counts
        self.feedback = feedback
        self._sizes = list(sizes)
        self._step = 0
        self._agreed = False
        self._under_way = False
        self._finite = True
        self._memory = torch.empty(0)
        self._sent = self._of = 0
        self._square = 0.0
        """Squared norm of this rank's compressed gradients."""

    def begin(self, device: torch.device) -> int:
        """Begin to sum a part; return the step, counted from 1. Collective in the first call after a start or load."""
        if not self._agreed:
            self._step = self.counts.agree(self._step, device)
            self._agreed = True
        if not self._under_way:
            self._under_way, self._finite = True, True
            self._sent, self._of, self._square = 0, 0, 0.0
        return self._step + 1

    def wanted(self, step: int, first: int, count: int) -> list[int] | None:
        """How many numbers to send of each of `count` tensors, from tensor `first` on; None: send everything."""
        counts = None if self.feedback.is_flush_step(step) else self.counts.of(step, self._sizes)
        return None if counts is None else counts[first : first + count]

    def record_sent(self, sent: int, of: int, square: float) -> None:
        """Record a part that was summed.

        Args:
            sent: numbers that this rank sent of the part's compressed tensors.
            of: all numbers of these tensors.
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
            self._step += 1
            self.counts.close(self._step, self._sizes, device)
            self.feedback.end_step(self._step)
        self._under_way = False

    def memory(self, numbers: int, like: Tensor) -> Tensor:
        """Uninitialised fp32 memory, [numbers]. On a CPU all parts of the stage share it, because fresh pages cost more
        than what is written to them; on CUDA torch's allocator reuses memory."""
        if like.is_cuda:
            return like.new_empty(numbers)
        if self._memory.numel() < numbers:
            self._memory = torch.empty(numbers)
        return self._memory[:numbers]

    def stats(self) -> ResidualStats:
        """Figures of the last step."""
        return ResidualStats(self._sent, self._of, self._square, self.feedback.norm() ** 2)

    def state(self) -> dict[str, Tensor]:
        """This rank's state between steps, without a copy."""
        layers = range(len(self._sizes))
        return {_STEP: torch.tensor(self._step), **self.feedback.state(), **self.counts.state(layers)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; whatever is missing starts afresh. If ranks loaded different steps, the next
        step goes on from the smallest."""
        self._step = int(state.get(_STEP, 0))
        self.feedback.load_state(state)
        self.counts.load_state(state, range(len(self._sizes)))
        self._agreed = self._under_way = False
