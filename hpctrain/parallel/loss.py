"""Cross-entropy as a share of the global mean, so that gradients are only summed, even if replicas differ in batch
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

LossFunction = Callable[[Tensor, Tensor], Tensor]


def make_loss(global_targets: int, vocabulary_mesh: DeviceMesh | None) -> LossFunction:
    """Return the loss function: the summed cross-entropy [nats] of a micro-batch, divided by the global batch's
    targets.

    Positions with target -100 are ignored.

    Args:
        global_targets: number of positions with a target in the global batch, over all replicas.
        vocabulary_mesh: the tp mesh if logits are split by vocabulary. The loss is then computed on the shards, and the
            caller must run forward and backward inside torch's `loss_parallel`.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss as a scalar, from logits [sequences, seq, vocab (/ tp)] and targets [sequences, seq]."""
        flat = logits.float().flatten(0, 1)
        if vocabulary_mesh is not None:
            flat = DTensor.from_local(flat, vocabulary_mesh, [Shard(-1)], run_check=False)
        total = F.cross_entropy(flat, targets.flatten(), reduction="sum")
        if isinstance(total, DTensor):
            total = total.full_tensor()
        return total / global_targets

    return loss
