"""Decides how many numbers of each tensor a step sends: one density for all tensors, or more for tensors that vary
more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.select.densities import counts, sparsities
from hpctrain.compress.select.moments import Moments
from hpctrain.records.plan.compression import Adaptive

_SPARSITY = "sparsity."
_UNKNOWN = -1.0


class SendCounts(ABC):
    """Decides how many numbers of each tensor a step sends; all ranks come to equal counts.

    The base class observes nothing and has no state.
    """

    @abstractmethod
    def of(self, step: int, sizes: Sequence[int]) -> list[int] | None:
        """Return the count k of numbers to send of each tensor; None: the step sends everything.

        Args:
            step: number of the step, counted from 1.
            sizes: count of numbers of each tensor.
        """

    @abstractmethod
    def agree(self, step: int, device: torch.device) -> int:
        """Return the step from which all ranks continue; ranks may have loaded different states. Collective."""

    def watches(self, step: int) -> bool:
        """Return whether `observe` needs the gradients of this step, counted from 1."""
        return False

    def observe(self, step: int, gradients: Sequence[Tensor], first: int = 0) -> None:
        """Observe this rank's gradients of a step, all at once or a few tensors at a time.

        Call it only for gradients that are finite on all ranks.

        Args:
            step: number of the step, counted from 1.
            gradients: gradients of compressed tensors, flat, fp32.
            first: index, among the compressed tensors, of the first gradient's tensor.
        """
        del step, gradients, first

    def close(self, step: int, sizes: Sequence[int], device: torch.device) -> None:
        """End a step, after all its gradients were observed. Collective in some steps.

        Args:
            step: number of the step, counted from 1.
            sizes: count of numbers of each tensor.
            device: device of the group's tensors.
        """
        del step, sizes, device

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the state between steps, keyed by the positions of the tensors."""
        return {}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        """Restore what `state` returned; missing entries start afresh."""
        del state, positions


class FixedSendCounts(SendCounts):
    """The same density for every tensor, after warm-up steps that send everything."""

    def __init__(self, group: dist.ProcessGroup, density: float, warmup_steps: int) -> None:
        """
        Args:
            group: the ranks.
            density: share of the numbers that is sent, above 0, at most 1.
            warmup_steps: number of first steps that send everything.
        """
        self._group = group
        self._density = density
        self._warmup_steps = warmup_steps

    def of(self, step: int, sizes: Sequence[int]) -> list[int] | None:
        return None if step <= self._warmup_steps else counts([1 - self._density] * len(sizes), sizes)

    def agree(self, step: int, device: torch.device) -> int:
        return int(_least([float(step)], self._group, device)[0])


class AdaptiveSendCounts(SendCounts):
    """A density for each tensor that follows the variance of its gradients over a number of steps (equations 2 to
    4).
    """

    def __init__(self, group: dist.ProcessGroup, layers: int, codec: Adaptive) -> None:
        """
        Args:
            group: the ranks.
            layers: number of compressed tensors.
            codec: the settings.
        """
        self._group = group
        self._codec = codec
        self._moments = Moments(layers)
        self._sparsity: list[float] | None = None

    @property
    def sparsity(self) -> list[float] | None:
        """The sparsity s of each tensor; None before the first profile is complete."""
        return self._sparsity

    def watches(self, step: int) -> bool:
        return self._passed(step) <= self._codec.warmup_steps

    def observe(self, step: int, gradients: Sequence[Tensor], first: int = 0) -> None:
        if self.watches(step):
            self._moments.observe(gradients, first)

    def close(self, step: int, sizes: Sequence[int], device: torch.device) -> None:
        if self._passed(step) == self._codec.warmup_steps:
            variances = self._moments.variances(self._group, device)
            self._sparsity = sparsities(variances, sizes, self._codec.limits, self._codec.mapping, self._codec.form)
            self._moments.restart()

    def _passed(self, step: int) -> int:
        """Return the number of steps since the last profile began, including this step."""
        warmup, every = self._codec.warmup_steps, self._codec.reprofile_every
        return step if every is None else (step - 1) % max(every, warmup) + 1

    def of(self, step: int, sizes: Sequence[int]) -> list[int] | None:
        if step <= self._codec.warmup_steps or self._sparsity is None:
            return None
        return counts(self._sparsity, sizes)

    def agree(self, step: int, device: torch.device) -> int:
        known = self._sparsity or [_UNKNOWN] * self._moments.layers
        least, *sparsity = _least([float(step), *known], self._group, device)
        self._sparsity = None if min(sparsity) < 0 else sparsity
        if self._sparsity is None and least >= self._codec.warmup_steps:
            # The profile is complete, but some rank lacks its result: measure again.
            least = 0
        if least != step:
            self._moments.restart()
        return int(least)

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        shares = {
            f"{_SPARSITY}{position}": torch.tensor(share, dtype=torch.float64)
            for position, share in zip(positions, self._sparsity or [], strict=False)
        }
        return {**shares, **self._moments.state(positions)}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        shares = [state.get(f"{_SPARSITY}{position}") for position in positions]
        known = [float(share) for share in shares if share is not None]
        self._sparsity = known if len(known) == len(positions) else None
        self._moments.load_state(state, positions)


def _least(numbers: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the minimum of each number over the ranks. Collective."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    least: list[float] = tensor.tolist()
    return least
