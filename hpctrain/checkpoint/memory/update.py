"""The optimizer's update of a rank's state in its segment, bucket after bucket, so that it can be finished by another
process wherever it was cut off.

Before a bucket changes, its bytes are copied to the undo area, and the cursor says so. A process that finds a bucket
under way copies these bytes back and updates the bucket once more. The update of a number needs only this number, its
moments and its gradient, so buckets may be cut anywhere, and every process computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.checkpoint.memory.mapping import MappedSegment
from hpctrain.checkpoint.memory.segment import IndexEntry, SegmentError, StepVerdict, read_state, read_verdict

GRAIN = 1024
"""A parameter is cut only at multiples of this count of numbers, so that a kernel rounds them as in the whole tensor:
it treats the last few numbers of a tensor in another way than full vectors."""


@dataclass(frozen=True)
class Slice:
    """Consecutive numbers of one parameter in one bucket."""

    parameter: int
    """Number of the parameter in the segment's index, from 0."""
    first: int
    """Position of the first number in the parameter's part on this rank."""
    end: int
    """Position after the last number."""


@dataclass(frozen=True)
class Bucket:
    """A part of every region that is updated at once."""

    start: int
    """First byte within each region."""
    end: int
    """Byte after the last one, within each region."""
    slices: tuple[Slice, ...]


def cut_buckets(entries: Sequence[IndexEntry], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of an update, in order: consecutive bytes of each region, at most `bucket_bytes` of a region.

    Args:
        entries: the parameters, in the order of their offsets.
    """
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    start = end = 0
    for number, entry in enumerate(entries):
        first = 0
        while first < entry.numel:
            place = entry.offset + first * entry.item_bytes
            start = start if slices else place
            last = min(entry.numel, first + (start + bucket_bytes - place) // entry.item_bytes)
            if last < entry.numel:
                last = first + max(0, last - first) // GRAIN * GRAIN
            if last > first:
                slices.append(Slice(number, first, last))
                end = entry.offset + last * entry.item_bytes
            if last < entry.numel:
                buckets.append(Bucket(start, end, tuple(slices)))
                slices = []
            first = last
    return [*buckets, Bucket(start, end, tuple(slices))] if slices else buckets


class BucketedUpdate:
    """AdamW over the regions of a mapped segment."""

    def __init__(self, segment: MappedSegment) -> None:
        self._segment = segment
        index = segment.index
        self._settings = index.optimizer
        self.buckets = cut_buckets(index.entries, index.bucket_bytes)
        self._targets: list[list[Tensor]] = []
        self._groups: list[list[dict[str, object]]] = []
        flat = {name: segment.flat(name) for name in ("model", "exp_avg", "exp_avg_sq")}
        self._optimizer: torch.optim.AdamW | None = None
        self._steps: list[Tensor] = []
        for bucket in self.buckets:
            targets = [flat["model"][cut.parameter][cut.first : cut.end] for cut in bucket.slices]
            decays = [index.entries[cut.parameter].weight_decay for cut in bucket.slices]
            self._targets.append(targets)
            optimizer = self._with_groups(targets, decays)
            for cut, target in zip(bucket.slices, targets, strict=True):
                step = torch.zeros(())
                self._steps.append(step)
                moments = {name: flat[name][cut.parameter][cut.first : cut.end] for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[target] = {"step": step, **moments}
            self._groups.append(optimizer.param_groups)

    def _with_groups(self, targets: list[Tensor], decays: list[float]) -> torch.optim.AdamW:
        """Return the optimizer that all buckets share, with the parameter groups of one bucket.

        Args:
            targets: the slices of the bucket.
            decays: weight decay of each slice.
        """
        settings = self._settings
        groups = [
            {"params": [t for t, d in zip(targets, decays, strict=True) if d == decay], "weight_decay": decay}
            for decay in dict.fromkeys(decays)
        ]
        fresh = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=settings.fused)
        if self._optimizer is None:
            self._optimizer = fresh
        else:
            self._optimizer.param_groups = fresh.param_groups
        return self._optimizer

    @torch.no_grad()
    def run(self, step: int, verdict: StepVerdict, gradients: Callable[[int], Tensor]) -> None:
        """Update all buckets that are not updated yet, and say that `step` is complete.

        Args:
            step: the step that the update ends.
            verdict: its verdict, which the segment has. If the norm is not finite, no weight changes.
            gradients: number of a parameter in the index -> its flat gradient, reduced and not clipped. The returned
                tensors are clipped in place.
        """
        control = self._segment.control
        if math.isfinite(verdict.norm):
            self._prepare(step, verdict)
            cursor = read_state(self._segment.descriptor).cursor
            for number in range(cursor // 2, len(self.buckets)):
                bucket = self.buckets[number]
                if cursor == 2 * number + 1:
                    self._segment.undo(bucket.start, bucket.end)
                else:
                    self._segment.remember(bucket.start, bucket.end)
                    control.set_cursor(2 * number + 1)
                self._update(number, verdict, gradients)
                control.set_cursor(2 * number + 2)
        control.set_state(step)

    def _prepare(self, step: int, verdict: StepVerdict) -> None:
        """Set the count of AdamW's steps before this one, which the bias correction depends on, and the learning
        rate."""
        skipped = verdict.loss_scale.skipped if verdict.loss_scale is not None else 0
        for count in self._steps:
            count.fill_(float(step - 1 - skipped))
        for groups in self._groups:
            for group in groups:
                group["lr"] = verdict.lr

    def _update(self, number: int, verdict: StepVerdict, gradients: Callable[[int], Tensor]) -> None:
        assert self._optimizer is not None, "there is a bucket"
        cuts, targets = self.buckets[number].slices, self._targets[number]
        for cut, target in zip(cuts, targets, strict=True):
            target.grad = gradients(cut.parameter)[cut.first : cut.end]
        largest = self._settings.clip_norm
        if largest is not None and verdict.norm > largest:
            factor = clip_factor(torch.tensor(verdict.norm, dtype=torch.float64), largest)
            torch._foreach_mul_([target.grad for target in targets if target.grad is not None], factor)
        self._optimizer.param_groups = self._groups[number]
        self._optimizer.step()
        for target in targets:
            target.grad = None


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """Return the factor, at most 1, by which gradients are multiplied to clip them.

    Args:
        norm: norm of the whole model's gradient, in double precision. NaN gives the factor 1.
        largest: largest norm after clipping.
    """
    return (largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)


def finish(segment: MappedSegment, step: int, verdict: StepVerdict | None = None) -> StepVerdict:
    """Finish the update of a step in a segment whose process is gone. Return the verdict of the step. If the step is
    complete, nothing changes.

    Args:
        step: the step that the segment is to have.
        verdict: the verdict of the step, from another rank; None: the segment has it.

    Raises:
        SegmentError: the segment cannot be brought to that step, or the step's verdict is not known.
    """
    state = read_state(segment.descriptor)
    known = read_verdict(segment.descriptor, step) or verdict
    if known is None:
        raise SegmentError(f"no rank's state in memory has the gradient norm of step {step}")
    if state.step == step and state.norm_step <= step:
        return known
    if state.step != step - 1 or not state.finishable:
        raise SegmentError(f"a rank's state in memory is of step {state.step}: it cannot be brought to step {step}")
    if state.norm_step != step:
        begin(segment, step, known)
    reduced = segment.flat("gradient")
    BucketedUpdate(segment).run(step, known, lambda number: reduced[number].clone())
    return known


def begin(segment: MappedSegment, step: int, verdict: StepVerdict) -> None:
    """Write the verdict of a step. From then on the step's update may run, and another process can finish it."""
    segment.control.set_cursor(0)
    segment.control.write_verdict(step, verdict)
    segment.control.set_norm(step)
