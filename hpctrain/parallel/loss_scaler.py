"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2): the loss is multiplied so that small gradients
do not vanish, and a step whose gradients overflow is skipped with a smaller scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.parallel.loss import LossFunction
from hpctrain.records.history.manifest import LossScale


class LossScaler:
    """Holds the scale. Every rank has one and all of them stay alike: they decide by the norm, which is the same."""

    def __init__(self, state: LossScale) -> None:
        self.state = state

    @property
    def value(self) -> float:
        return self.state.value

    def scaled(self, loss: LossFunction) -> LossFunction:
        """The loss function times the scale of the moment."""

        def scaled(output: Tensor, target: Tensor) -> Tensor:
            return loss(output, target) * self.value

        return scaled

    def skips(self, norm: float) -> bool:
        """Whether a step whose gradient has this norm is to be skipped; the scale changes for the next one.

        With the scale at its smallest, 1, overflow is not the scale's doing and no step is skipped.
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
