"""When the gradients of a step are finished, while its backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class GradientReadyTracker:
    """Knows which parameters have got the last addition to their gradient in this step.

    How many additions that takes (one a micro-batch; none for what the loss does not reach) is counted in the first
    step and is the same in all others, because the schedule is.
    """

    def __init__(self, parameters: list[nn.Parameter], on_ready: Callable[[GradientReadyTracker], None]) -> None:
        self.ready = [False] * len(parameters)
        """By position of the parameter; all False in the first step."""
        self._parameters = parameters
        self._on_ready = on_ready
        self._additions = [0] * len(parameters)
        self._expected: list[int] | None = None

    def register_hooks(self) -> None:
        """Take notice of every addition from now on; `on_ready` is called whenever a gradient is finished."""
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._count_addition(index))

    def gradient(self, index: int) -> Tensor:
        """The gradient of the parameter at this position."""
        grad = self._parameters[index].grad
        assert grad is not None, "asked for once it is complete"
        return grad

    def next_step(self) -> None:
        """Everything begins anew.

        Raises:
            RuntimeError: a gradient was added to after it counted as finished; what was sent of it is wrong.
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
