"""The loss, and its dynamic scale in fp16 (Micikevicius et al. 2018, section 3.2).

The loss of a micro-batch is its summed cross-entropy divided by the targets of the global batch. So losses and
gradients of micro-batches and replicas are only summed, even if replicas differ in batch size. In fp16 the loss is
multiplied by the loss scale, so that small gradients do not underflow. A step whose gradients overflow is skipped, and
the loss scale is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain.records.history.manifest import LossScale

LossFunction = Callable[[Tensor, Tensor], Tensor]


def make_loss(global_targets: int, vocabulary_mesh: DeviceMesh | None) -> LossFunction:
    """Return the loss function: the summed cross-entropy [nats] of a micro-batch, divided by the global batch's
    targets.

    Positions with target -100 are ignored.

    Args:
        global_targets: number of positions with a target in the global batch, over all replicas.
        vocabulary_mesh: the tp mesh if logits are split by vocabulary, else None. With the mesh, the loss is computed
            on the shards, and the caller must run forward and backward inside torch's `loss_parallel`.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of a micro-batch: its summed cross-entropy divided by `global_targets`.

        Args:
            logits: [sequences, seq, vocab (/ tp if split)].
            targets: [sequences, seq].
        """
        flat = logits.float().flatten(0, 1)
        if vocabulary_mesh is not None:
            flat = DTensor.from_local(flat, vocabulary_mesh, [Shard(-1)], run_check=False)
        total = F.cross_entropy(flat, targets.flatten(), reduction="sum")
        if isinstance(total, DTensor):
            total = total.full_tensor()
        return total / global_targets

    return loss


class LossScaler:
    """Holds the loss scale. The scale stays equal on all ranks, because it changes only by whether the gradient norm is
    finite, and this norm is equal on all ranks.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state

    def scaled(self, loss: LossFunction) -> LossFunction:
        """Return a loss function that multiplies the result of `loss` by the loss scale at the time of the call."""

        def scaled(output: Tensor, target: Tensor) -> Tensor:
            return loss(output, target) * self.state.value

        return scaled

    def skips(self, norm: float) -> bool:
        """Return whether to skip the optimizer step, because the gradient norm is not finite; update the loss scale for
        the next step.

        At the minimum scale of 1, the scale did not cause the overflow, so the step is not skipped; the caller then
        ends the run with an error.

        Args:
            norm: norm of the whole gradient.
        """
        if math.isfinite(norm):
            self.state = self.state.after_good_step()
            return False
        if self.state.value == 1.0:
            return False
        self.state = self.state.after_overflow()
        return True

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the loss scale, in place. Call it after the gradients are summed over replicas. With
        a codec that keeps state such as a residual, call it before they are summed, because the state outlasts the
        present loss scale.
        """
        torch._foreach_div_(gradients, self.state.value)
