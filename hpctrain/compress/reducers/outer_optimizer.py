"""Replicas that train on their own and meet every few steps (DiLoCo: Douillard et al., 2023, arXiv:2311.08105).

Between two meetings the weights of the replicas differ. So: a checkpoint is taken at a meeting only (`outer_sync`
makes one), as is the state here; a validation loss is that of the replica which computes it, unless it follows a
meeting; and norms of gradients, with the clipping that goes by them, are each replica's own: its loss is to be
divided by its own number of tokens. Moments of the inner optimizer are never averaged, as in the paper; after a
restart they are those that were saved.

Why a checkpoint is taken at a meeting: one of all replicas would be n times as large and fit only n replicas, and one
of a single replica would throw away the others' work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.reducers.reducer import DenseReducer


class OuterOptimizer:
    """Moves the weights of all replicas to a common place: one step of Nesterov's method against the mean way that the
    replicas went since they last met."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[Tensor],
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        """
        Args:
            group: the replicas.
            parameters: plain local tensors, equal on all replicas now; the same list in the same order everywhere.
            every: steps from one meeting to the next.
            outer_lr: 1 with momentum 0 is the mean of the replicas' weights.
            outer_momentum: of Nesterov's method, in [0, 1).
        """
        self._group = group
        self._world = dist.get_world_size(group)
        self._parameters = parameters
        self._every = every
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._reducer = DenseReducer(group)
        self._anchors = [_full(parameter) for parameter in parameters]
        """The weights at the last meeting."""
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._states_agree = False
        """Whether the ranks know that all have velocities of the same meetings, or none has."""
        self._sync_count = 0
        """Meetings that the velocities come from."""
        self._in_sync = True

    @property
    def in_sync(self) -> bool:
        """Whether all replicas have the same weights: nothing was trained since they last met."""
        return self._in_sync

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """What follows the inner optimizer's step: a meeting, where one is due. Collective over the group.

        Args:
            step: the one just done, 1 is the first of the run.

        Returns:
            Bytes this rank put on the wire.
        """
        self._in_sync = False
        return self.outer_sync() if step % self._every == 0 else 0

    @torch.no_grad()
    def outer_sync(self) -> int:
        """Meet now: before a checkpoint, at the end of a run. Nothing happens where all are together. Collective.

        A way that is not finite in any replica leaves all with weights that are not finite, for the loss to tell;
        velocities and the place of the last meeting stay as they were.

        Returns:
            Bytes this rank put on the wire.
        """
        if self._in_sync or self._world == 1:
            self._in_sync = True
            return 0
        sent_bytes = 0 if self._states_agree else self._agree_on_state()
        # The way back to the last meeting takes the place of the weights, so that a message needs no memory of its own.
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            parameter.copy_(anchor - parameter)
        sent_bytes += self._reducer.reduce([parameter.data for parameter in self._parameters])
        finite = all(bool(parameter.isfinite().all()) for parameter in self._parameters)
        for parameter, anchor, velocity in zip(self._parameters, self._anchors, self._velocities, strict=True):
            if not finite:
                parameter.fill_(torch.nan)
                continue
            outer_gradient = parameter.float() / self._world
            velocity.mul_(self._outer_momentum).add_(outer_gradient)
            anchor.sub_(outer_gradient.add_(velocity, alpha=self._outer_momentum), alpha=self._outer_lr)
            parameter.copy_(anchor)
        self._sync_count += finite
        self._in_sync = True
        return sent_bytes

    def state(self) -> dict[str, Tensor]:
        """The velocities, the same on every rank; live tensors. The place of the meeting is in the weights.

        Raises:
            RuntimeError: the replicas are not together, so that no weights go with it.
        """
        if not self._in_sync:
            raise RuntimeError(
                "replicas that train on their own have a state only where they meet: call outer_sync first"
            )
        velocities = {f"velocity.{index}": velocity for index, velocity in enumerate(self._velocities)}
        return {"met": torch.tensor(self._sync_count), **velocities}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on behind a `state`, with the weights that the parameters have now, the same on all replicas; velocities
        that are missing on one rank start at zero on all of them.

        Raises:
            CheckpointError: a tensor in it has another shape than here.
        """
        self.drop_state()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            anchor.copy_(parameter.detach())
        self._in_sync = True
        if not all(f"velocity.{index}" in state for index in range(len(self._velocities))):
            return
        for index, velocity in enumerate(self._velocities):
            found = state[f"velocity.{index}"]
            if found.shape != velocity.shape:
                raise CheckpointError(
                    f"velocity.{index}: found shape {list(found.shape)}, allowed {list(velocity.shape)}; "
                    "a state of other parallel degrees is to be dropped"
                )
            velocity.copy_(found)
        self._sync_count = int(state["met"])

    def drop_state(self) -> None:
        """Forget the velocities."""
        for velocity in self._velocities:
            velocity.zero_()
        self._sync_count = 0
        self._states_agree = False

    def _agree_on_state(self) -> int:
        """Ranks whose velocities come from different meetings would part for ever: then all begin anew."""
        ends = torch.tensor([self._sync_count, -self._sync_count], device=self._anchors[0].device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
        if int(ends[0]) != -int(ends[1]):
            self.drop_state()
        self._states_agree = True
        return 2 * (self._world - 1) * ends.nbytes // self._world


def _full(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)
