"""State of sparse sums: the step, how many numbers of each tensor a rank sends, and the residuals.

Error feedback adds the residual, which earlier steps did not send, to the next gradient. g is the gradient, e the
residual, a the corrected gradient that the codec compresses, C(a) what was sent, e' the next residual. The modes are:

    standard    a = g + e       e' = a − C(a)                   every number arrives in the end
    decayed     a = g + β·e     e' = a − C(a)                   the residual fades
    paper       a = g + e       e' = g − C(a) + β·e             equation (5) of the paper, word for word
    none        a = g           no residual

Equation (5) is no error feedback in the usual sense: a number that is sent leaves the residual −(1−β)·e, and the
residual of a number that is never sent settles at g/(1−β). The mode paper is offered only for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.codecs.buffers import BufferPool
from hpctrain.compress.codecs.sparse_message import ValueCode
from hpctrain.compress.collectives.reduce_scatter import Residuals, ResidualStats
from hpctrain.compress.select.selectors import seed_of, select_with_values
from hpctrain.compress.select.sparse_counts import SendCounts
from hpctrain.records.plan.compression import Feedback, Reset, Selector

_PREFIX = "residual."


class ErrorFeedback:
    """Error feedback: holds the residuals of several tensors, by key, and adds them to the next gradients."""

    def __init__(
        self,
        mode: Feedback = "standard",
        *,
        beta: float = 0.9,
        reset: Reset = "none",
        reset_every: int = 1000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Create error feedback without residuals.

        Args:
            mode: the corrected gradient a and the next residual e', from gradient g, residual e and the sent numbers
                C(a). standard: a = g + e, e' = a − C(a). decayed: a = g + β·e, e' = a − C(a). paper: a = g + e, e' = g
                − C(a) + β·e. none: a = g, no residual.
            beta: β of the modes decayed and paper.
            reset: what happens to the residuals every `reset_every` steps. none: nothing. zero: they are dropped (as in
                the paper). flush: the caller sends everything in that step; see `is_flush_step`.
            reset_every: number of steps between two resets.
            dtype: dtype of the residuals, fp32 or bf16; in bf16 each step rounds them.
        """
        self._mode = mode
        self._beta = beta
        self._reset = reset
        self._reset_every = reset_every
        self._dtype = dtype
        self._residuals: dict[str, Tensor] = {}

    def add(self, key: str, gradient: Tensor) -> Tensor:
        """Return the corrected gradient a: the gradient plus the residual, which mode decayed first multiplies by β.

        Call `store_residual` next: until then the residual's memory may hold the corrected gradient. So call `add` only
        for a gradient that is finite on all ranks.

        Args:
            key: key of the tensor, the same in every step.
            gradient: [n], fp32; unchanged.

        Returns:
            [n], fp32; do not change it before `store_residual`. With mode none, the gradient itself.

        Raises:
            CheckpointError: the loaded residual has another size.
        """
        if self._mode == "none":
            return gradient
        residual = self._residual(key, gradient)
        if self._mode == "decayed":
            residual.mul_(self._beta)
        if self._mode == "paper" or self._dtype != torch.float32:
            return gradient + residual
        # The residual becomes a, and `store_residual` makes it a residual again. This takes one pass over memory and no
        # memory for a.
        return residual.add_(gradient)

    def add_to(self, key: str, gradient: Tensor) -> Tensor:
        """Return the corrected gradient a in the memory of the gradient: the gradient plus the residual, which mode
        decayed multiplies by β. With mode none, a is the gradient itself.

        The residual does not change, so the caller need not call `store_residual` next.

        Args:
            key: key of the tensor, the same in every step.
            gradient: [n], fp32; overwritten with a.

        Raises:
            CheckpointError: the loaded residual has another size.
        """
        if self._mode == "none":
            return gradient
        return gradient.add_(self._residual(key, gradient), alpha=self._beta if self._mode == "decayed" else 1.0)

    def store_residual(self, key: str, a: Tensor, positions: Tensor, sent: Tensor) -> None:
        """Set the residual to the corrected gradient a minus the numbers that were sent.

        In the mode paper of error feedback, the residual e becomes a minus the sent numbers minus (1−β) times the old
        e, which is equation (5) of the paper (β: the factor `beta` of `__init__`). In the mode none, there is no
        residual to set.

        Args:
            key: as given to `add` or `add_to`.
            a: what `add` or `add_to` returned; overwritten.
            positions: [k], int64, distinct: positions of the sent numbers.
            sent: [k], fp32: the numbers as the receivers decode them, so that the residual includes rounding errors.
        """
        if self._mode == "none":
            return
        residual = self._residuals[key]
        # In mode paper, g + β·e = a − (1−β)·e.
        unsent = a.sub_(residual, alpha=1 - self._beta) if self._mode == "paper" else a
        unsent.index_add_(0, positions, sent, alpha=-1)
        if unsent is not residual:
            residual.copy_(unsent)

    def add_residual(self, key: str, start: int, values: Tensor) -> None:
        """Add `values` to a range of a tensor's residual. The values are the sums that this rank computed over all
        ranks, minus what it sent of these sums.

        Args:
            key: key of a tensor for which `store_residual` was called in this step.
            start: position at which the range begins.
            values: [length of the range], fp32.
        """
        if self._mode != "none":
            self._residuals[key][start : start + values.numel()] += values

    def take_all(self, key: str, gradient: Tensor) -> Tensor:
        """Return the corrected gradient of the tensor `key`, as `add` does, and drop the tensor's residual. Call the
        method in a step that sends the whole corrected gradient.

        Raises:
            CheckpointError: the loaded residual has another size.
        """
        a = self.add(key, gradient)
        self._residuals.pop(key, None)
        return a

    def forget(self, key: str) -> None:
        """Drop the residual of a tensor. Call it after a step that sent the whole corrected gradient."""
        self._residuals.pop(key, None)

    def end_step(self, step: int) -> None:
        """Drop all residuals if the setting `reset` is 'zero' and the step that ends is a multiple of `reset_every`.

        Args:
            step: number of the step, counted from 1.
        """
        if self._reset == "zero" and step % self._reset_every == 0:
            self.drop()

    def is_flush_step(self, step: int) -> bool:
        """Return whether this step must send everything: there are residuals (the feedback mode is not none), `reset`
        is flush, and `step`, counted from 1, is a multiple of `reset_every`."""
        return self._mode != "none" and self._reset == "flush" and step % self._reset_every == 0

    def norm(self) -> float:
        """Return the L2 norm of all residuals of this rank, taken together."""
        if not self._residuals:
            return 0.0
        return float(torch.stack(torch._foreach_norm(list(self._residuals.values()), dtype=torch.float32)).norm())

    def state(self) -> dict[str, Tensor]:
        """Return 'residual.KEY' -> residual of the tensor KEY, without a copy."""
        return {_PREFIX + key: residual for key, residual in self._residuals.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned. Other keys are ignored; missing residuals start at zero."""
        self._residuals = {
            key.removeprefix(_PREFIX): residual.detach().flatten().to(self._dtype, copy=True)
            for key, residual in state.items()
            if key.startswith(_PREFIX) and self._mode != "none"
        }

    def drop(self) -> None:
        """Drop all residuals."""
        self._residuals.clear()

    def _residual(self, key: str, gradient: Tensor) -> Tensor:
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros_like(gradient, dtype=self._dtype)
        elif residual.numel() != gradient.numel():
            raise CheckpointError(
                f"{_PREFIX}{key}: found {residual.numel()} numbers for a gradient of {gradient.numel()}; allowed: a "
                "state saved with the same parallel degrees; drop it to start afresh"
            )
        elif residual.device != gradient.device:
            residual = self._residuals[key] = residual.to(gradient.device)
        return residual


_STEP = "step"


class SparseSettings(NamedTuple):
    """Settings of a sparse sum: how numbers are selected, and the precision in which they are sent."""

    selector: Selector
    values: ValueCode

    def select(self, values: Tensor, k: int, step: int, tensor: int) -> tuple[Tensor, Tensor]:
        """Select about k values of a tensor; return their positions, [about k], int64, ascending, and copies of the
        values.

        Args:
            values: [n], fp32.
            k: wanted count.
            step: number of the step; with `tensor`, it seeds random choices.
            tensor: index of the tensor.
        """
        return select_with_values(values, k, self.selector, seed_of(step, tensor))


class SparseState(Residuals):
    """State of sparse sums of several tensors: step counter, counts of numbers to send, and residuals.

    A step in which a gradient is not finite on some rank does not add to the step counter. The tensors of a sharded
    stage are summed in several parts (its `fully_shard` modules), each once a step, in an order that is the same on all
    ranks.
    """

    def __init__(
        self, positions: Sequence[int], sizes: Sequence[int], counts: SendCounts, feedback: ErrorFeedback
    ) -> None:
        """Create the state before the first step.

        Args:
            positions: for each compressed tensor, the number that names its residual in the state.
            sizes: for each compressed tensor, its count of numbers.
            counts: decides how many numbers of each tensor every rank sends in a step.
            feedback: holds the residuals.
        """
        self.counts = counts
        self.feedback = feedback
        self.positions, self.sizes = list(positions), list(sizes)
        self._step = 0
        self._agreed = False
        self._under_way = False
        self._finite = True
        self._sent = self._of = 0
        self._square = 0.0
        """Squared norm of this rank's gradients of compressed parameters, before compression."""
        self.buffers = BufferPool(bounded=True)
        """Memory of sums that have begun and not ended."""

    def begin(self, device: torch.device) -> int:
        """Begin a step, unless one is under way; return the step's number, counted from 1.

        Collective in the first call after a start or load, in which the ranks agree on the step.
        """
        if not self._agreed:
            self._step = self.counts.agree(self._step, device)
            self._agreed = True
        if not self._under_way:
            self._under_way, self._finite = True, True
            self._sent, self._of, self._square = 0, 0, 0.0
        return self._step + 1

    def wanted(self, step: int, first: int, count: int) -> list[int] | None:
        """Return how many numbers of each of `count` tensors this rank sends in step `step`, from tensor `first` on;
        None: all numbers of these tensors.
        """
        counts = None if self.feedback.is_flush_step(step) else self.counts.of(step, self.sizes)
        return None if counts is None else counts[first : first + count]

    def record_sent(self, sent: int, of: int, square: float) -> None:
        """Add the figures of a sum that this step has made; a sharded stage makes several.

        Args:
            sent: count of numbers that this rank sent of the sum's compressed tensors.
            of: count of all numbers of these tensors.
            square: squared norm of this rank's gradient of these tensors.
        """
        self._sent += sent
        self._of += of
        self._square += square

    def not_finite(self) -> None:
        """Record that a sum was given up, because its gradient is not finite on some rank; the step then does not add
        to the count of steps, and `counts.close` is not called for it.
        """
        self._finite = False

    def end_step(self, device: torch.device) -> None:
        """End a step after all its gradients were summed. Collective in the steps in which ranks agree on new
        densities.
        """
        if self._under_way and self._finite:
            self.counts.close(self._step + 1, self.sizes, device)
            self.count_step()
        self._under_way = False

    def count_step(self) -> None:
        """Count a step. Call it after its gradients were summed and `counts.close` was called."""
        self._under_way = False
        self._step += 1
        self.feedback.end_step(self._step)

    def stats(self) -> ResidualStats:
        """Return this rank's figures of the last step: the count of sent numbers, the count of all numbers of
        compressed parameters, and the squared L2 norms of the gradient and of the residuals.
        """
        return ResidualStats(self._sent, self._of, self._square, self.feedback.norm() ** 2)

    def state(self) -> dict[str, Tensor]:
        """Return the state as key -> tensor, without a copy: the number of finished steps, the residual of the tensor
        with number N in `positions` as 'residual.N', and the keys of `SendCounts.state`."""
        return {_STEP: torch.tensor(self._step), **self.feedback.state(), **self.counts.state(self.positions)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; entries that are missing start as in a new run.

        If ranks loaded different steps, the next step continues from the smallest.
        """
        self._step = int(state.get(_STEP, 0))
        self.feedback.load_state(state)
        self.counts.load_state(state, self.positions)
        self._agreed = self._under_way = False
