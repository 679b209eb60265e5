"""Detects when each gradient of a step is finished, while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class GradientReadyTracker:
    """Tracks which parameters have received the last addition to their gradient in this step.

    The first step counts the additions: one per micro-batch, none for parameters that the loss does not depend on. The
    count is the same in all other steps, because the schedule is.
    """

    def __init__(self, parameters: list[nn.Parameter], on_ready: Callable[[GradientReadyTracker], None]) -> None:
        self.ready = [False] * len(parameters)
        """[index of a parameter] -> whether its gradient is finished; all False in the first step."""
        self._parameters = parameters
        self._on_ready = on_ready
        self._additions = [0] * len(parameters)
        self._expected: list[int] | None = None

    def register_hooks(self) -> None:
        """Count every addition from now on, and call `on_ready` whenever a gradient is finished."""
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count_addition(index))

    def gradient(self, index: int) -> Tensor:
        """Return the gradient of the parameter with this index."""
        grad = self._parameters[index].grad
        assert grad is not None, "asked for once it is complete"
        return grad

    def next_step(self) -> None:
        """Reset the counts for the next step.

        Raises:
            RuntimeError: something was added to a gradient after it counted as finished, so a wrong value was sent.
        """
        if self._expected is None:
            self._expected = self._additions
        elif any(now > then for now, then in zip(self._additions, self._expected, strict=True)):
            raise RuntimeError("the backward pass added to a gradient more often than in the first step")
        self._additions = [0] * len(self._parameters)
        self.ready = [False] * len(self._parameters)

    def _count_addition(self, index: int) -> None:
        self._additions[index] += 1
        if self._expected is not None and self._additions[index] == self._expected[index]:
            self.ready[index] = True
            self._on_ready(self)
