"""Local SGD: replicas train on their own and combine their weights at each outer sync (DiLoCo: Douillard et al. 2023,
arXiv:2311.08105).

Between two outer syncs the weights of the replicas differ. This has three consequences:

- A checkpoint, and the state of the outer optimizer, is taken only right after an outer sync (call `outer_sync` first).
- A validation loss is that of the replica which computes it, unless it follows an outer sync.
- A replica's gradient is the mean over the replica's own targets. Gradients are clipped by the root mean square of the
  replicas' norms.

Moments of the inner optimizer, which makes each replica's own steps, are never averaged, as in the paper on DiLoCo.
A checkpoint holds those of one replica, and after a restart every replica has them.

Why checkpoints need an outer sync: a checkpoint of all replicas would be n times as large and fit only n replicas, and
a checkpoint of a single replica would throw away the others' work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.collectives.reduce_scatter import StepState
from hpctrain.compress.reducers.reducer import DenseReducer
from hpctrain.records.plan.compression import LocalSteps


class OuterOptimizer(StepState):
    """Optimizer of local SGD over the replicas' weights: at each outer sync, it makes the weights of all replicas
    equal.

    It takes one step with Nesterov momentum along the mean over replicas of the change of weights since the last outer
    sync.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[Tensor], codec: LocalSteps) -> None:
        """Remember the present weights as those of the last outer sync.

        Args:
            group: the replicas.
            parameters: plain local tensors, equal on all replicas now; the same list in the same order on every rank.
            codec: the settings. A learning rate of 1 with momentum 0 gives the mean of the replicas' weights.
        """
        self._group = group
        self._world = dist.get_world_size(group)
        self._parameters = parameters
        self._codec = codec
        self._reducer = DenseReducer(group)
        self._anchors = [parameter.detach().to(torch.float32, copy=True) for parameter in parameters]
        """Weights after the last outer sync."""
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._states_agree = False
        """Whether the ranks have checked that their velocities (momentum buffers) come from the same number of outer
        syncs.
        """
        self._sync_count = 0
        """Number of outer syncs that have changed the velocities."""
        self._in_sync = True
        """Whether all replicas have the same weights, because no step followed the last outer sync."""

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """Run an outer sync if one is due; call it after each step of the inner optimizer. Collective over the
        replicas.

        Args:
            step: number of the step just done, counted from 1.

        Returns:
            Bytes that this rank sent.
        """
        self._in_sync = False
        return self.outer_sync() if step % self._codec.every == 0 else 0

    @torch.no_grad()
    def outer_sync(self) -> int:
        """Combine the replicas' weights now, as before a checkpoint or at the end of a run. Collective over the
        replicas.

        Nothing happens if no step followed the last outer sync. If the change of any replica is not finite, the weights
        of all replicas become NaN, so that the loss shows it; velocities (momentum buffers) and the weights of the last
        outer sync stay.

        Returns:
            Bytes that this rank sent.
        """
        if self._in_sync or self._world == 1:
            self._in_sync = True
            return 0
        sent_bytes = 0 if self._states_agree else self._agree_on_state()
        # The change since the last outer sync overwrites the weights, so that a message needs no additional memory.
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            parameter.copy_(anchor - parameter)
        sent_bytes += self._reducer.reduce([parameter.data for parameter in self._parameters])
        finite = all(bool(parameter.isfinite().all()) for parameter in self._parameters)
        for parameter, anchor, velocity in zip(self._parameters, self._anchors, self._velocities, strict=True):
            if not finite:
                parameter.fill_(torch.nan)
                continue
            outer_gradient = parameter.float() / self._world
            velocity.mul_(self._codec.outer_momentum).add_(outer_gradient)
            anchor.sub_(outer_gradient.add_(velocity, alpha=self._codec.outer_momentum), alpha=self._codec.outer_lr)
            parameter.copy_(anchor)
        self._sync_count += finite
        self._in_sync = True
        return sent_bytes

    def state(self) -> dict[str, Tensor]:
        """Return the outer optimizer's momentum buffers, 'velocity.INDEX' -> tensor, and 'met', the count of outer
        syncs. INDEX is the number of a parameter, counted from 0 in the order of the optimizer's parameters.

        All are equal on every rank. The buffers are not copied, and the next outer sync changes them.

        Raises:
            RuntimeError: a step followed the last outer sync, so that the replicas' weights differ.
        """
        if not self._in_sync:
            raise RuntimeError(
                "replicas that train on their own have a state only right after an outer sync: call outer_sync first"
            )
        velocities = {f"velocity.{index}": velocity for index, velocity in enumerate(self._velocities)}
        return {"met": torch.tensor(self._sync_count), **velocities}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned. The parameters must already hold the weights of the moment at which `state`
        was called; they are equal on all replicas.

        If momentum buffers are missing on one rank, they start at zero on all ranks.

        Raises:
            CheckpointError: a tensor of the state has another shape than the parameter.
        """
        self.drop_state()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            anchor.copy_(parameter.detach())
        self._in_sync = True
        if not all(f"velocity.{index}" in state for index in range(len(self._velocities))):
            return
        for index, velocity in enumerate(self._velocities):
            loaded = state[f"velocity.{index}"]
            if loaded.shape != velocity.shape:
                raise CheckpointError(
                    f"velocity.{index}: found shape {list(loaded.shape)}, allowed {list(velocity.shape)}; "
                    "a state of other parallel degrees is to be dropped"
                )
            velocity.copy_(loaded)
        self._sync_count = int(state["met"])

    def drop_state(self) -> None:
        """Set the momentum buffers to zero."""
        for velocity in self._velocities:
            velocity.zero_()
        self._sync_count = 0
        self._states_agree = False

    def _agree_on_state(self) -> int:
        """Drop the momentum buffers of all ranks if they come from different numbers of outer syncs. With unlike
        buffers, the replicas' weights would diverge.

        Collective over the replicas.

        Returns:
            Bytes that this rank sent.
        """
        ends = torch.tensor([self._sync_count, -self._sync_count], device=self._anchors[0].device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
        if int(ends[0]) != -int(ends[1]):
            self.drop_state()
        self._states_agree = True
        return 2 * (self._world - 1) * ends.nbytes // self._world
