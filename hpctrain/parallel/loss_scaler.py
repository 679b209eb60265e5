"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2): the loss is multiplied so that small gradients
do not underflow. A step whose gradients overflow is skipped, and the scale is reduced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.parallel.loss import LossFunction
from hpctrain.records.history.manifest import LossScale


class LossScaler:
    """Holds the loss scale. It stays equal on all ranks, because each decides by the gradient norm, which is equal."""

    def __init__(self, state: LossScale) -> None:
        self.state = state

    @property
    def value(self) -> float:
        return self.state.value

    def scaled(self, loss: LossFunction) -> LossFunction:
        """The loss function times the current scale."""

        def scaled(output: Tensor, target: Tensor) -> Tensor:
            return loss(output, target) * self.value

        return scaled

    def skips(self, norm: float) -> bool:
        """Whether to skip a step with this gradient norm; updates the scale for the next step.

        If the scale is at its minimum, 1, it did not cause the overflow, and no step is skipped.
        """
        if math.isfinite(norm):
            self.state = self.state.after_good_step()
            return False
        if self.value == 1.0:
            return False
        self.state = self.state.after_overflow()
        return True

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place, once they are summed."""
        torch._foreach_div_(gradients, self.value)
