"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2).

The loss is multiplied by the scale so that small gradients do not underflow. A step whose gradients overflow is
skipped, and the scale is reduced.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.parallel.loss import LossFunction
from hpctrain.records.history.manifest import LossScale


class LossScaler:
    """Holds the loss scale, which stays equal on all ranks: each rank changes it by the gradient norm, which is
    equal.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state

    @property
    def value(self) -> float:
        return self.state.value

    def scaled(self, loss: LossFunction) -> LossFunction:
        """Return a loss function whose result is multiplied by the current scale."""

        def scaled(output: Tensor, target: Tensor) -> Tensor:
            return loss(output, target) * self.value

        return scaled

    def skips(self, norm: float) -> bool:
        """Return whether to skip the step with this gradient norm; update the scale for the next step.

        At the minimum scale of 1 the scale did not cause the overflow, so no step is skipped.
        """
        if math.isfinite(norm):
            self.state = self.state.after_good_step()
            return False
        if self.value == 1.0:
            return False
        self.state = self.state.after_overflow()
        return True

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place. Call it after they are summed."""
        torch._foreach_div_(gradients, self.value)
