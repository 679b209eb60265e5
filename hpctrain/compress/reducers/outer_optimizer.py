"""Local SGD: replicas train on their own and combine their weights at each outer sync (DiLoCo: Douillard et al. 2023,
arXiv:2311.08105).

Between two outer syncs the weights of the replicas differ. This has three consequences:

- A checkpoint, and the state of the outer optimizer, is taken only right after an outer sync (call `outer_sync` first).
- A validation loss is that of the replica which computes it, unless it follows an outer sync.
- A replica's gradient is the mean over the replica's own targets. Gradients are clipped by the root mean square of the
  replicas' norms.

Moments of the inner optimizer, which makes each replica's own steps, are never averaged, as in the paper on DiLoCo.
A checkpoint holds those of one replica, and after a restart every replica has them.

With several parts (Streaming DiLoCo: Douillard et al. 2025, arXiv:2501.18512), each outer sync combines only one part
of the parameters, so its messages are shorter. With overlap, the messages of a sync travel during the next steps.

Why checkpoints need an outer sync: a checkpoint of all replicas would be n times as large and fit only n replicas, and
a checkpoint of a single replica would throw away the others' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.integers import IntegerCode
from hpctrain.compress.collectives.reduce_scatter import StepState
from hpctrain.compress.reducers.quantized import QuantizedBucketCodec
from hpctrain.compress.reducers.reduce_scatter_all_gather import ReduceScatterAllGather
from hpctrain.compress.reducers.reducer import DenseReducer
from hpctrain.records.plan.compression import MIN_COMPRESSED_ELEMENTS
from hpctrain.records.plan.local_sgd import LocalSteps


class OuterOptimizer(StepState):
    """Optimizer of local SGD over the replicas' weights: at each outer sync, it makes the weights of all replicas
    equal.

    It takes one step with Nesterov momentum along the mean over replicas of the change of weights since the last outer
    sync. With integers, the rounding errors of a change are added to the next one (error feedback).
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
        self._lr, self._momentum = codec.nesterov
        sizes = [parameter.numel() for parameter in parameters]
        self._parts = [
            OuterPart(members, _reducer_of(codec, group, [parameters[index] for index in members]))
            for members in equal_parts(sizes, codec.parts)
        ]
        self._anchors = [parameter.detach().to(torch.float32, copy=True) for parameter in parameters]
        """Weights after the last outer sync."""
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._states_agree = False
        """Whether the ranks have checked that their velocities (momentum buffers) come from the same number of outer
        syncs.
        """
        self._sync_count = 0
        """Number of outer syncs of a part that have changed the velocities."""
        self._in_sync = True
        """Whether all replicas have the same weights, because no step followed the last outer sync of all parts."""

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """Run the outer sync of each part for which one is due; call it after each step of the inner optimizer.
        Collective over the replicas.

        Args:
            step: number of the step just done, counted from 1.

        Returns:
            Bytes that this rank sent.
        """
        self._in_sync = False
        if self._world == 1:
            return 0
        sent_bytes = 0
        for number, part in enumerate(self._parts):
            if part.ends_at == step:
                sent_bytes += self._end_sync(part)
            if (step - (number + 1) * self._codec.every // len(self._parts)) % self._codec.every == 0:
                sent_bytes += self._begin_sync(part, step + self._codec.overlap_steps)
                if not self._codec.overlap_steps:
                    sent_bytes += self._end_sync(part)
                    self._in_sync = len(self._parts) == 1
        return sent_bytes

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
        sent_bytes = sum(self._end_sync(part) for part in self._parts if part.ends_at is not None)
        for part in self._parts:
            sent_bytes += self._begin_sync(part, None) + self._end_sync(part)
        self._in_sync = True
        return sent_bytes

    def _begin_sync(self, part: OuterPart, ends_at: int | None) -> int:
        """Start to sum the changes of a part's weights over the replicas. Collective over the replicas.

        Args:
            part: a part of which no sync is under way.
            ends_at: step after which the sync ends; None or the present step: at once.

        Returns:
            Bytes that this rank sent, less those that `_end_sync` returns.
        """
        sent_bytes = 0 if self._states_agree else self._agree_on_state()
        weights = [self._parameters[index].data for index in part.members]
        changes = [self._anchors[index] - weight for index, weight in zip(part.members, weights, strict=True)]
        if ends_at is not None and self._codec.overlap_steps:
            part.changes, part.sent = changes, [weight.float().clone() for weight in weights]
        else:
            # The change overwrites the weights, so that only one of them is in memory while messages travel.
            for weight, change in zip(weights, changes, strict=True):
                weight.copy_(change)
            part.changes, part.sent = weights, []
        part.ends_at = ends_at
        part.reducer.begin(part.changes)
        return sent_bytes

    def _end_sync(self, part: OuterPart) -> int:
        """Wait for the sums of a part, and make the outer optimizer's step. Collective over the replicas.

        The weights become those of the outer optimizer, plus what the replica itself has changed them by since it sent
        its change.

        Returns:
            Bytes that this rank sent.
        """
        sent_bytes = part.reducer.finish()
        finite = all(bool(change.isfinite().all()) for change in part.changes)
        for number, index in enumerate(part.members):
            parameter, anchor, velocity = self._parameters[index], self._anchors[index], self._velocities[index]
            if not finite:
                parameter.fill_(torch.nan)
                continue
            outer_gradient = part.changes[number].float() / self._world
            velocity.mul_(self._momentum).add_(outer_gradient)
            anchor.sub_(outer_gradient.add_(velocity, alpha=self._momentum), alpha=self._lr)
            if part.sent:
                parameter.add_(anchor - part.sent[number])
            else:
                parameter.copy_(anchor)
        part.changes, part.sent, part.ends_at = [], [], None
        self._sync_count += finite
        return sent_bytes

    def state(self) -> dict[str, Tensor]:
        """Return the outer optimizer's state as key -> tensor: the momentum buffers ('velocity.INDEX'), the count of
        outer syncs ('met'), and with integers this rank's residuals ('residual.INDEX'). INDEX is the number of a
        parameter, counted from 0 in the order of the optimizer's parameters.

        All but the residuals are equal on every rank. The tensors are not copied, and the next outer sync changes them.

        Raises:
            RuntimeError: a step followed the last outer sync, so that the replicas' weights differ.
        """
        if not self._in_sync:
            raise RuntimeError(
                "replicas that train on their own have a state only right after an outer sync: call outer_sync first"
            )
        state = {f"velocity.{index}": velocity for index, velocity in enumerate(self._velocities)}
        state["met"] = torch.tensor(self._sync_count)
        for part in self._parts:
            for key, residual in part.reducer.state().items():
                state[f"{_RESIDUAL}{part.members[int(key.removeprefix(_RESIDUAL))]}"] = residual
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned. The parameters must already hold the weights of the moment at which `state`
        was called; they are equal on all replicas.

        If momentum buffers are missing on one rank, they start at zero on all ranks.

        Raises:
            CheckpointError: a tensor of the state has another shape than the parameter; for a residual, the next outer
                sync raises it.
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
        for part in self._parts:
            keys = {f"{_RESIDUAL}{index}": f"{_RESIDUAL}{number}" for number, index in enumerate(part.members)}
            part.reducer.load_state({local: state[key] for key, local in keys.items() if key in state})

    def drop_state(self) -> None:
        """Set the momentum buffers and the residuals to zero."""
        for velocity in self._velocities:
            velocity.zero_()
        for part in self._parts:
            part.reducer.drop_state()
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


@dataclass
class OuterPart:
    """A part of the parameters, which has outer syncs of its own."""

    members: list[int]
    """Indices of the part's parameters."""
    reducer: DenseReducer | ReduceScatterAllGather
    """Sums the changes of the part's weights."""
    changes: list[Tensor] = field(default_factory=list)
    """During a sync: the changes of the weights, which become their sums over the replicas."""
    sent: list[Tensor] = field(default_factory=list)
    """During a sync that overlaps steps: the weights when their changes were sent."""
    ends_at: int | None = None
    """Step after which the sync under way ends; None if there is none."""


_RESIDUAL = "residual."


def _reducer_of(
    codec: LocalSteps, group: dist.ProcessGroup, weights: Sequence[Tensor]
) -> DenseReducer | ReduceScatterAllGather:
    """Return the reducer of a part's changes: integers for matrices, exact sums for small and one-dimensional
    parameters."""
    coded = [
        index for index, weight in enumerate(weights) if weight.ndim >= 2 and weight.numel() >= MIN_COMPRESSED_ELEMENTS
    ]
    if codec.values_bits is None or not coded:
        return DenseReducer(group)
    return ReduceScatterAllGather(group, dict.fromkeys(coded, QuantizedBucketCodec(IntegerCode(codec.values_bits))))


def equal_parts(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of `sizes` in `count` runs of consecutive ones, whose sums are about equal; runs without an
    index are left out."""
    ends = list(accumulate(sizes))
    parts: list[list[int]] = [[] for _ in range(count)]
    for index, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        parts[min(count - 1, int((end - size / 2) * count / max(1, ends[-1])))].append(index)
    return [part for part in parts if part]
