"""The interface of a reducer, the dense reducer, which sums exactly, and the counter of warm-up steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.collectives.overlapped_work import OverlappedWork
from hpctrain.compress.collectives.reduce_scatter import LevelBytes, StepState
from hpctrain.compress.reducers.bucket_scheduler import BucketScheduler, unflatten_like
from hpctrain.records.plan.compression import BUCKET_BYTES

COPIES_IN_FLIGHT = 4
"""Largest count of buckets on the wire whose gradients were copied into a buffer; more buffers would take more memory.
"""


class Reducer(StepState, ABC):
    """Interface of an object that sums gradients over the replicas of a stage."""

    level_bytes: LevelBytes | None = None
    """Bytes of the last call of `reduce` by level; None if gradients are not summed by level, or before a call."""

    @abstractmethod
    def reduce(self, gradients: list[Tensor]) -> int:
        """Replace each gradient by its sum over the replicas. Collective over the group.

        Returns:
            Bytes that this rank sent.

        Raises:
            CheckpointError: loaded state, such as a residual, has another size than its gradient.
            ValueError: with mode topk or adaptive, a message of another rank is about a gradient of another size.
            RuntimeError: a collective failed; or after `overlap`, the backward pass added to a gradient after it was
                sent.
        """

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None = None, hooks: bool = True
    ) -> None:
        """Send buckets before `reduce` is called: in every step when their group is done, and with `hooks` from the
        second step on as soon as the backward pass has finished their gradients.

        A reducer that needs all gradients before it can send any does nothing. Call this method once, and only if
        nothing changes gradients between the backward pass and `reduce`.

        Args:
            parameters: plain tensors (no DTensors) in the shapes of the gradients, in the order in which `reduce` gets
                their gradients.
            groups: indices of the parameters whose gradients are complete together, as those of a stage; the groups in
                the order in which all ranks send them. Gradients in no group are sent by `reduce`. None: all parameters
                are one group.
            hooks: whether the backward pass adds to the `grad` of `parameters` themselves, and by autograd.
        """

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        """Send the gradients of a group of `overlap`, to which nothing adds any more in this step. The call does not
        wait for other ranks.

        Args:
            number: index of the group in `groups`.
            gradients: all its gradients, in the order of its indices; they share memory with those that `reduce` gets.
        """

    def proceed(self) -> None:
        """Go on with the sums under way as far as that is possible without waiting for other ranks."""

    def defer(self, deferred: bool) -> None:
        """Set whether buckets of the following steps wait for `reduce`, in spite of `overlap`."""

    def after_step(self, step: int) -> int:
        """Combine the replicas' weights if an outer sync of local SGD is due after this step. Collective over the
        replicas.

        Args:
            step: number of the optimizer step just done, counted from 1.

        Returns:
            Bytes that this rank sent.
        """
        return 0

    def before_checkpoint(self) -> None:
        """Make the weights of all replicas equal. Collective over the replicas.

        Only a reducer of local SGD has something to do: between outer syncs the replicas' weights differ.
        """


REDUCER_METRICS = ("density", "residual_norm_ratio")
"""Names of the figures that a reducer of any mode may give for `metrics.jsonl`.

density: count of numbers that this rank sent, divided by the count of all numbers of the compressed tensors.
residual_norm_ratio: L2 norm of this rank's residuals divided by that of its gradients of compressed parameters,
    before compression.
"""


def residual_ratio_metric(residual: float, gradient: float) -> dict[str, float]:
    """Return the entry `residual_norm_ratio` of `Reducer.metrics`; empty if the ratio is not finite.

    Args:
        residual: norm of this rank's residuals.
        gradient: norm of this rank's gradients of compressed parameters, before compression.
    """
    ratio = residual / gradient if gradient > 0 else math.nan
    return {"residual_norm_ratio": ratio} if math.isfinite(ratio) else {}


class DenseReducer(Reducer):
    """Reducer that sums exactly, in the gradients' dtype, by ring all-reduce. After a call of `overlap`, it sums while
    the backward passes of the step go on.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group = group
        self._world = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._scheduler = BucketScheduler(self._send, bucket_bytes, self._make_room)
        self._sent_bytes = 0
        self._in_flight: list[_BucketInFlight] = []
        self._pool = BufferPool()
        self._parameters: Sequence[Tensor] = ()
        self._flat_gradients: dict[int, Tensor] = {}
        """Number of a bucket -> memory that holds the bucket's gradients, from the moment they are sent until the next
        step.
        """

    def overlap(
        self, parameters: Sequence[Tensor], groups: Sequence[Sequence[int]] | None = None, hooks: bool = True
    ) -> None:
        """Send buckets before `reduce` is called, as `Reducer.overlap` describes.

        With `hooks`, the parameters' `grad` moves into memory of the reducer, which the next step overwrites. So sums
        need not be copied back.
        """
        if self._world > 1:
            self._parameters = parameters if hooks else ()
            self._scheduler.overlap(parameters, groups, hooks)

    def group_done(self, number: int, gradients: list[Tensor]) -> None:
        if self._world > 1:
            self._scheduler.group_done(number, gradients)

    def proceed(self) -> None:
        self._scheduler.proceed()

    def defer(self, deferred: bool) -> None:
        self._scheduler.is_deferred = deferred

    def reduce(self, gradients: list[Tensor]) -> int:
        self.begin(gradients)
        return self.finish()

    def begin(self, gradients: list[Tensor]) -> None:
        """Run the first half of `reduce`: send all gradients that are not sent yet, without waiting for the sums.

        Raises:
            RuntimeError: after `overlap`, the backward pass added to a gradient after it was sent.
        """
        if self._world > 1:
            self._scheduler.send_remaining(gradients)

    def finish(self) -> int:
        """Run the second half of `reduce`: wait for the sums. Return the bytes that this rank sent."""
        while self._in_flight:
            self._finish_bucket()
        # A ring all-reduce sends every byte on 2·(n−1)/n times from each rank.
        sent_bytes = 2 * (self._world - 1) * self._sent_bytes // self._world
        self._sent_bytes = 0
        return sent_bytes

    def _send(self, number: int, tensors: list[Tensor]) -> None:
        copy = None
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat = tensors[0]
        elif self._are_grads(number, tensors):
            flat = self._flatten_in_place(number, tensors)
        else:
            self._make_room(wait=True)
            like, numbers = tensors[0], sum(tensor.numel() for tensor in tensors)
            copy = self._pool.take(max(numbers, self._bucket_bytes // like.element_size()), like, like.dtype)
            flat = copy[:numbers]
            torch._foreach_copy_(unflatten_like(flat, tensors), tensors)
        work = OverlappedWork(dist.all_reduce(flat, group=self._group, async_op=True), flat.device)
        self._in_flight.append(_BucketInFlight(number, tensors, flat, copy, work))
        self._sent_bytes += flat.numel() * flat.element_size()

    def _make_room(self, wait: bool = False) -> bool:
        """Finish buckets until another one may be copied into a buffer; return whether it may.

        Args:
            wait: whether to wait for other ranks; otherwise only buckets whose sums have arrived are finished.
        """
        while full := sum(flight.copy is not None for flight in self._in_flight) >= COPIES_IN_FLIGHT:
            if not (wait or self._in_flight[0].work.has_ended):
                break
            self._finish_bucket()
        return not full

    def _are_grads(self, number: int, tensors: list[Tensor]) -> bool:
        """Return whether the tensors of a bucket are the parameters' `grad` themselves, not views or copies.

        Args:
            number: number of the bucket.
            tensors: the bucket's gradients.
        """
        if not self._parameters:
            return False
        bucket = self._scheduler.buckets[number]
        return all(self._parameters[index].grad is tensor for index, tensor in zip(bucket, tensors, strict=True))

    def _flatten_in_place(self, number: int, tensors: list[Tensor]) -> Tensor:
        """Move the gradients of bucket `number` into one contiguous buffer, and return the buffer.

        Each step reuses the bucket's buffer, because page faults of new memory cost more than the copy.
        """
        if number not in self._flat_gradients:
            self._flat_gradients[number] = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        flat = self._flat_gradients[number]
        parts = unflatten_like(flat, tensors)
        if not all(tensor.is_set_to(part) for tensor, part in zip(tensors, parts, strict=True)):
            torch._foreach_copy_(parts, tensors)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.data = part
        return flat

    def _finish_bucket(self) -> None:
        """Wait for the sums of the oldest bucket on the wire, and copy them back to the gradients if they are in a
        buffer.
        """
        flight = self._in_flight.pop(0)
        with ACTIVITY.doing(f"all-reduce over dp, bucket {flight.number}", waits="dp"):
            flight.work.wait()
        if flight.copy is not None:
            torch._foreach_copy_(flight.tensors, unflatten_like(flight.flat, flight.tensors))
            self._pool.give_back(flight.copy)


@dataclass(frozen=True)
class _BucketInFlight:
    """A bucket whose all-reduce has begun and not ended."""

    number: int
    """Number of the bucket, counted from 0 in each step."""
    tensors: list[Tensor]
    """The bucket's gradients."""
    flat: Tensor
    """The bucket's gradients as one flat tensor, which the all-reduce sums in place."""
    copy: Tensor | None
    """Buffer to give back after the all-reduce; None if the gradients themselves are summed in place."""
    work: OverlappedWork
    """The all-reduce, which may still run."""


class CodecReducer(Reducer):
    """Base class of reducers that send some gradients by a codec and sum the others exactly."""

    def __init__(self, group: dist.ProcessGroup, chosen: Sequence[int]) -> None:
        """Create two exact reducers: one for the exempt gradients, and one for the gradients that the codec sends. The
        second one is used in steps in which all gradients are summed exactly, such as the warm-up steps.

        Args:
            group: the replicas.
            chosen: indices of the gradients that the codec sends.
        """
        self._group = group
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._chosen = list(chosen)
        self._exempt, self._whole = DenseReducer(group), DenseReducer(group)
        """The reducers of the gradients that are not chosen, and of the chosen ones in steps that sum them exactly."""

    def _split(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients that the codec sends, and the exempt gradients, which are summed exactly."""
        chosen = frozenset(self._chosen)
        exempt = [gradient for index, gradient in enumerate(gradients) if index not in chosen]
        return [gradients[index] for index in self._chosen], exempt


class WarmUp:
    """Step counter of a run, which tells whether the warm-up steps are over.

    The count is equal on all ranks, including ranks that joined later.
    """

    def __init__(self, group: dist.ProcessGroup, steps: int) -> None:
        self._group = group
        self._steps = steps
        self.step = 0
        """Number of the step that was counted last; the first step is 1."""
        self.agreed = False
        """Whether the ranks have agreed on the step: False from a start or a load until the next call of `over`."""

    def over(self, device: torch.device) -> bool:
        """Count the step that begins; return whether the warm-up steps are over, so that gradients are compressed.

        Collective over the group in the first call after a start or a load.

        Args:
            device: device of the gradients; the group can send tensors that are on it.
        """
        if not self.agreed:
            # A rank without a state takes over the step of the others: if it alone sent uncompressed gradients, it
            # would hang.
            taken = torch.tensor([self.step], device=device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=self._group)
            self.step = int(taken)
            self.agreed = True
        self.step += 1
        return self.step > self._steps

    def state(self) -> Tensor:
        """Return the number of the run's steps that `over` has counted so far, as a tensor []."""
        return torch.tensor(self.step)

    def load_state(self, taken: Tensor | None) -> None:
        """Set the count of steps to `taken`, a result of `state`; None: no steps were counted. In the next call of
        `over`, all ranks take over the largest count of any rank.
        """
        self.step = 0 if taken is None else int(taken)
        self.agreed = False
