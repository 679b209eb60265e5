"""Error feedback: what a step did not send is kept and added to the next gradient.

g is the gradient, e what is kept, a what the choice is made from, C(a) what was sent.

    standard    a = g + e       e' = a − C(a)                   every number arrives in the end
    decayed     a = g + β·e     e' = a − C(a)                   what is kept fades
    paper       a = g + e       e' = g − C(a) + β·e             equation (5), word for word
    none        a = g           nothing is kept

Equation (5) is no error feedback in the usual sense: a number that is sent leaves −(1−β)·e behind, and one that stays
below the threshold settles at g/(1−β). It is here to be compared with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hpctrain.base.errors import CheckpointError

FeedbackMode = Literal["none", "standard", "decayed", "paper"]
ResidualReset = Literal["none", "zero", "flush"]
_PREFIX = "residual."


class ErrorFeedback:
    """The residuals of many tensors, each under a key of its own."""

    def __init__(
        self,
        mode: FeedbackMode = "standard",
        *,
        beta: float = 0.9,
        reset: ResidualReset = "none",
        reset_every: int = 1000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            mode: which recursion; see the head of this file.
            beta: β of decayed and paper.
            reset: what becomes of the residuals after every `reset_every` steps. zero: they are lost (the paper's
                way). flush: a step sends everything; its caller sees to that.
            reset_every: steps.
            dtype: in which residuals are kept, fp32 or bf16; in bf16 each step rounds what is kept.
        """
        self._mode = mode
        self._beta = beta
        self._reset = reset
        self._reset_every = reset_every
        self._dtype = dtype
        self._residuals: dict[str, Tensor] = {}

    def add(self, key: str, gradient: Tensor) -> Tensor:
        """a: the gradient and what is kept of earlier ones.

        Between this and `store_residual`, which must follow, the residual is not whole: call it only for a gradient
        that is finite on all ranks.

        Args:
            key: of the tensor, the same in every step.
            gradient: [n], fp32; unchanged.

        Returns:
            [n], fp32; to be left unchanged until `store_residual`. With mode none, the gradient itself.

        Raises:
            CheckpointError: the residual, which was loaded, is of another size.
        """
        if self._mode == "none":
            return gradient
        residual = self._residual(key, gradient)
        if self._mode == "decayed":
            residual.mul_(self._beta)
        if self._mode == "paper" or self._dtype != torch.float32:
            return gradient + residual
        # The residual becomes a, and `store_residual` makes it a residual again: one pass over memory, none for a.
        return residual.add_(gradient)

    def add_to(self, key: str, gradient: Tensor) -> Tensor:
        """a, as `add` gives it, in the memory of the gradient: the residual stays as it is until `store_residual`,
        which need not follow.

        Args:
            key: of the tensor, the same in every step.
            gradient: [n], fp32; its memory is used.

        Raises:
            CheckpointError: the residual, which was loaded, is of another size.
        """
        if self._mode == "none":
            return gradient
        return gradient.add_(self._residual(key, gradient), alpha=self._beta if self._mode == "decayed" else 1.0)

    def store_residual(self, key: str, a: Tensor, positions: Tensor, sent: Tensor) -> None:
        """Take what `add` gave less what was sent of it as the residual.

        Args:
            key: as given to `add` or `add_to`.
            a: what that returned; its memory is used.
            positions: [k], int64: what was sent, without repetition.
            sent: [k], fp32: as the receivers read it, so that what rounding took is kept.
        """
        if self._mode == "none":
            return
        residual = self._residuals[key]
        # In paper, g + β·e = a − (1−β)·e.
        left = a.sub_(residual, alpha=1 - self._beta) if self._mode == "paper" else a
        left.index_add_(0, positions, sent, alpha=-1)
        if left is not residual:
            residual.copy_(left)

    def add_residual(self, key: str, start: int, values: Tensor) -> None:
        """Add to the residual of a stretch of a tensor: what the owner of a sum did not pass on of it.

        Args:
            key: of a tensor of which `store_residual` was called in this step.
            start: where the stretch begins.
            values: [stretch], fp32.
        """
        if self._mode != "none":
            self._residuals[key][start : start + values.numel()] += values

    def take_all(self, key: str, gradient: Tensor) -> Tensor:
        """What a step that sends all numbers has to send of a tensor, a; nothing of it is kept."""
        a = self.add(key, gradient)
        self._residuals.pop(key, None)
        return a

    def forget(self, key: str) -> None:
        """Keep nothing of a tensor: all of what `add_to` gave was sent."""
        self._residuals.pop(key, None)

    def end_step(self, step: int) -> None:
        """Drop everything where that is due.

        Args:
            step: the one that ends, counted from 1.
        """
        if self._reset == "zero" and step % self._reset_every == 0:
            self.drop()

    def is_flush_step(self, step: int) -> bool:
        """Whether this step, counted from 1, is to send everything."""
        return self._mode != "none" and self._reset == "flush" and step % self._reset_every == 0

    def norm(self) -> float:
        """Euclidean norm of all that is kept."""
        if not self._residuals:
            return 0.0
        return float(torch.stack(torch._foreach_norm(list(self._residuals.values()), dtype=torch.float32)).norm())

    def state(self) -> dict[str, Tensor]:
        """The residuals as `residual.KEY`; shared memory."""
        return {_PREFIX + key: residual for key, residual in self._residuals.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave; other keys are passed over, and what is missing starts at zero."""
        self._residuals = {
            key.removeprefix(_PREFIX): residual.detach().flatten().to(self._dtype, copy=True)
            for key, residual in state.items()
            if key.startswith(_PREFIX) and self._mode != "none"
        }

    def drop(self) -> None:
        """Forget everything that is kept."""
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
