"""Sums the largest numbers of each gradient: each rank sends the largest of its numbers, as integers, and the sum of
the integers is exact.

The codec follows TAGC (Polyakov et al., EuroMLSys 2025) with lossless homomorphic compression (Li et al. 2024,
arXiv:2402.07529): the ranks agree on an index, the union of the positions that they send, and then sum the numbers at
these positions. `index: 1bit` and `index: 4bit` are the index as published.

Numbers are sent as integers, for two reasons. In fp32 a sketch is decoded by subtracting numbers from a cell, so small
numbers inherit the rounding errors of large ones. And a GPU adds to a cell in any order, so ranks would get different
bits.

With `ratio: auto` there is no sketch. Once all ranks know the index, a plain list needs one cell per number and cannot
fail; a sketch needs 1/0.818 cells per number. A sketch would pay only if index and numbers travelled in one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.indexed_numbers import IndexedCode
from hpctrain.compress.collectives.agreed_index import agreed_index
from hpctrain.compress.collectives.exchange import counts_between
from hpctrain.compress.collectives.sparse_state import ErrorFeedback
from hpctrain.compress.reducers.reducer import CodecReducer, WarmUp, residual_ratio_metric
from hpctrain.compress.select.selectors import select_with_values
from hpctrain.records.plan.compression import Tagc


class TagcReducer(CodecReducer):
    """The reducer of mode `tagc`: sums of the numbers that each rank selected; the numbers that a rank did not select
    stay in its residuals.

    Numbers travel as 32-bit integers: multiples of a quantum, which is so large that the sum over the ranks cannot
    overflow. The quantum is a power of two per tensor that the ranks agree on in each step. Errors of this rounding go
    to the residual. The sums of the integers are exact, so they depend neither on the order of addition nor on the
    device.
    """

    def __init__(self, group: dist.ProcessGroup, chosen: Sequence[int], codec: Tagc, feedback: ErrorFeedback) -> None:
        """Create the reducer before the first step.

        Args:
            group: the replicas.
            chosen: indices of the gradients that are compressed; the others are summed exactly.
            codec: the settings, the same on every rank.
            feedback: holds the residuals; only this reducer uses it.
        """
        super().__init__(group, chosen)
        self._codec = codec
        self._code = IndexedCode(codec.ratio, codec.index)
        self._feedback = feedback
        self._warm_up = WarmUp(group, codec.warmup_steps)
        self._metrics: dict[str, float] = {}
        self._norm = torch.tensor(math.nan)
        """Norm of this rank's gradients of compressed parameters in the last step, before compression."""

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        compressed = self._warm_up.over(gradients[0].device)
        tensors, exempt = self._split(gradients)
        sent_bytes = self._exempt.reduce(exempt)
        self._metrics = {}
        if not compressed or not tensors:
            return sent_bytes + self._whole.reduce(tensors)
        sent_bytes += self._ring_bytes(1)
        # A step with a number that is not finite is summed exactly, so that all ranks see it, and before it could
        # change a residual.
        if not self._finite_everywhere([*exempt, *tensors]):
            return sent_bytes + self._whole.reduce(tensors)
        step = self._warm_up.step
        if self._feedback.is_flush_step(step):
            for index, tensor in zip(self._chosen, tensors, strict=True):
                tensor.copy_(self._feedback.take_all(str(index), _flat(tensor)).view_as(tensor))
            return sent_bytes + self._whole.reduce(tensors)
        sent_bytes += self._reduce_chosen(tensors)
        self._feedback.end_step(step)
        return sent_bytes

    def _reduce_chosen(self, tensors: list[Tensor]) -> int:
        choices = self._choose(tensors)
        total = sum(choice.tensor.numel() for choice in choices)
        selected = torch.cat([choice.places + choice.start for choice in choices])
        numbers = torch.cat([choice.numbers() for choice in choices])
        with ACTIVITY.doing("index over dp", waits="dp"):
            union, index_bytes = agreed_index(self._code.form, selected, total, self._group)
        message = self._code.write(union, selected, numbers, total)
        with ACTIVITY.doing("all-reduce over dp, chosen numbers", waits="dp"):
            dist.all_reduce(message, group=self._group)
        sums, decoded = self._code.read(message, union, total)
        arrived = self._code.arrived(union, selected, decoded)
        self._metrics = {
            "density": len(selected) / total,
            "union_density": len(union) / total,
            "unread": 1 - float(decoded.float().mean()) if len(decoded) else 0.0,
        }
        union_counts = counts_between(union, [*(choice.start for choice in choices), total])
        own_counts = [len(choice.places) for choice in choices]
        for choice, places, values, got in zip(
            choices,
            union.split(union_counts),
            sums.split(union_counts),
            arrived.split(own_counts),
            strict=True,
        ):
            choice.finish(self._feedback, got, places, values)
        return index_bytes + self._ring_bytes(len(message)) + self._ring_bytes(len(choices))

    def _choose(self, tensors: list[Tensor]) -> list[_Choice]:
        choices, start = [], 0
        for index, tensor in zip(self._chosen, tensors, strict=True):
            whole = self._feedback.add(str(index), _flat(tensor))
            places, values = select_with_values(whole, math.ceil(self._codec.density * whole.numel()))
            choices.append(_Choice(str(index), tensor, start, whole, places, values))
            start += tensor.numel()
        quanta = agree_quanta([choice.values for choice in choices], self._world, self._group)
        for choice, quantum in zip(choices, quanta, strict=True):
            choice.quantum = quantum
        return choices

    def _finite_everywhere(self, tensors: list[Tensor]) -> bool:
        # A norm is finite only if all numbers are. A norm that overflows costs one exact step, nothing else.
        norms = torch._foreach_norm(tensors, dtype=torch.float32)
        self._norm = torch.stack(norms[-len(self._chosen) :]).norm()
        broken = (~torch.stack(norms).isfinite()).any().int()
        with ACTIVITY.doing("all-reduce over dp, overflow", waits="dp"):
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=self._group)
        return not bool(broken)

    def _ring_bytes(self, numbers: int) -> int:
        return 2 * (self._world - 1) * 4 * numbers // self._world

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step; empty if the step was not compressed.

        density: share of the compressed tensors' numbers that this rank sent. union_density: share of these numbers
        that any rank sent. unread: of the numbers that any rank sent, the share that could not be decoded.
        residual_norm_ratio: L2 norm of this rank's residuals divided by that of its gradients of compressed parameters,
        before compression.
        """
        return self._metrics | residual_ratio_metric(self._feedback.norm(), float(self._norm)) if self._metrics else {}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, 'residual.INDEX' -> tensor, and 'steps', the count of steps. INDEX is a
        gradient's number, counted from 0, in the list that `reduce` gets.

        The residuals are not copied, and the next step changes them.
        """
        return {"steps": self._warm_up.state(), **self._feedback.state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; entries that are missing start as in a new run."""
        self._warm_up.load_state(state.get("steps"))
        self._feedback.load_state(state)

    def drop_state(self) -> None:
        """Drop the residuals."""
        self._feedback.drop()


def agree_quanta(selected: Sequence[Tensor], world: int, group: dist.ProcessGroup) -> list[float]:
    """Return for each tensor the quantum of which sent numbers are multiples, a power of two: the smallest with which
    the sum over the ranks does not overflow an int32. Collective over the group.

    Args:
        selected: for each tensor, the numbers that this rank selected, fp32.
        world: number of ranks.
        group: the ranks.
    """
    peaks = torch.stack([values.abs().max() if len(values) else values.new_zeros(()) for values in selected])
    with ACTIVITY.doing("all-reduce over dp, largest numbers", waits="dp"):
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
    # If the peak is below 2^e, the sum over n ranks is below 2^(e + log2 n). The quantum makes this 2^30 quanta.
    above = math.ceil(math.log2(world)) - 30
    return [2.0 ** max(exponent + above, -126) for exponent in torch.frexp(peaks).exponent.tolist()]


@dataclass
class _Choice:
    """The numbers that a rank selected from one tensor in a step."""

    key: str
    """Key of the tensor's residual in the error feedback."""
    tensor: Tensor
    """The tensor's gradient, which `finish` overwrites with the sums."""
    start: int
    """Position of the tensor's first number among the numbers of all compressed tensors."""
    whole: Tensor
    """The gradient plus its residual, flat, fp32."""
    places: Tensor
    """Positions of the selected numbers within the tensor, ascending: [selected], int64."""
    values: Tensor
    """The selected numbers of `whole`: [selected], fp32."""
    quantum: float = field(default=1.0)
    """Power of two of which the sent values are multiples; equal on all ranks."""

    def numbers(self) -> Tensor:
        """Return the selected values as multiples of the tensor's quantum, a power of two: [selected], int32."""
        return (self.values / self.quantum).round_().to(torch.int32)

    def finish(self, feedback: ErrorFeedback, arrived: Tensor, union: Tensor, sums: Tensor) -> None:
        """Store the tensor's residual, and replace the tensor by the sums, with 0 at positions that no rank sent or
        whose sum could not be decoded.

        Args:
            feedback: the residuals of the reducer.
            arrived: bool, whether each of this rank's selected numbers was decoded.
            union: positions of the tensor's numbers that at least one rank sent. A position counts the numbers of all
                compressed tensors, so the tensor's first number has the position `start`.
            sums: int32, multiples of `quantum`, at the positions of `union`.
        """
        sent = self.numbers().float() * self.quantum
        feedback.store_residual(self.key, self.whole, self.places[arrived], sent[arrived])
        values = sums.float() * self.quantum
        in_place = self.tensor.is_contiguous() and self.tensor.dtype == torch.float32
        flat = self.tensor.view(-1).zero_() if in_place else torch.zeros(self.tensor.numel(), device=values.device)
        flat[union - self.start] = values
        if not in_place:
            self.tensor.copy_(flat.view_as(self.tensor))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.float().reshape(-1)
