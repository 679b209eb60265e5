"""What the sparse reduce-scatters of a sharded stage have in common: the step that is under way, how much of each
tensor it sends, and what was not sent of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.compress.collectives.feedback import ErrorFeedback
from hpctrain.compress.collectives.reduce_scatter import ResidualStats
from hpctrain.compress.select.sparse_counts import SendCounts

_STEP = "step"


class SparseScatterState:
    """Every part of the stage is summed once in a step, in any order that is the same on all ranks.

    A step in which a part's gradient is not finite on any rank does not count.
    """

    def __init__(self, sizes: Sequence[int], counts: SendCounts, feedback: ErrorFeedback) -> None:
        """
        Args:
            sizes: numbers of each compressed tensor, those of one part behind those of another.
            counts: how much of each is sent in which step.
            feedback: what becomes of the rest.
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
        """A part is about to be summed: the step, counted from 1. Collective where a state was loaded, and at first."""
        if not self._agreed:
            self._step = self.counts.agree(self._step, device)
            self._agreed = True
        if not self._under_way:
            self._under_way, self._finite = True, True
            self._sent, self._of, self._square = 0, 0, 0.0
        return self._step + 1

    def wanted(self, step: int, first: int, count: int) -> list[int] | None:
        """k of `count` tensors from `first` on, or None where everything is sent."""
        counts = None if self.feedback.is_flush_step(step) else self.counts.of(step, self._sizes)
        return None if counts is None else counts[first : first + count]

    def record_sent(self, sent: int, of: int, square: float) -> None:
        """A part is summed.

        Args:
            sent: numbers that this rank sent of its compressed tensors.
            of: all of them.
            square: squared norm of this rank's gradient of them.
        """
        self._sent += sent
        self._of += of
        self._square += square

    def not_finite(self) -> None:
        """A part could not be summed: a gradient of it is not finite on some rank."""
        self._finite = False

    def end_step(self, device: torch.device) -> None:
        """All parts are summed. Collective in some steps."""
        if self._under_way and self._finite:
            self._step += 1
            self.counts.close(self._step, self._sizes, device)
            self.feedback.end_step(self._step)
        self._under_way = False

    def memory(self, numbers: int, like: Tensor) -> Tensor:
        """So many numbers in fp32, of whatever value. On a CPU all parts of the stage share them, because fresh pages
        cost more than what is written to them; on CUDA torch sees to that."""
        if like.is_cuda:
            return like.new_empty(numbers)
        if self._memory.numel() < numbers:
            self._memory = torch.empty(numbers)
        return self._memory[:numbers]

    def stats(self) -> ResidualStats:
        """Of the last step."""
        return ResidualStats(self._sent, self._of, self._square, self.feedback.norm() ** 2)

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps; shared memory."""
        layers = range(len(self._sizes))
        return {_STEP: torch.tensor(self._step), **self.feedback.state(), **self.counts.state(layers)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave; what is missing starts afresh. Where ranks loaded different steps, the next
        step settles on the smallest."""
        self._step = int(state.get(_STEP, 0))
        self.feedback.load_state(state)
        self.counts.load_state(state, range(len(self._sizes)))
        self._agreed = self._under_way = False
