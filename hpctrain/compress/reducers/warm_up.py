"""Counts the steps at the beginning of a run whose gradients are summed exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class WarmUp:
    """Step counter of a run. The count is equal on all ranks, including ranks that joined later."""

    def __init__(self, group: dist.ProcessGroup, steps: int) -> None:
        self._group = group
        self._steps = steps
        self._taken = 0
        self._agreed = False

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the step; False from a start or a load until the next call of `over`."""
        return self._agreed

    @property
    def step(self) -> int:
        """Number of the step that was counted last; the first step is 1."""
        return self._taken

    def over(self, device: torch.device) -> bool:
        """Count the step that begins; return whether its gradients are compressed. Collective over the group.

        Args:
            device: device of the gradients, from which the group can send.
        """
        if not self._agreed:
            # A rank without a state takes over the step of the others: if it alone sent uncompressed gradients, it
            # would hang.
            taken = torch.tensor([self._taken], device=device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=self._group)
            self._taken = int(taken)
            self._agreed = True
        self._taken += 1
        return self._taken > self._steps

    def state(self) -> Tensor:
        """Return the number of steps done, as a tensor."""
        return torch.tensor(self._taken)

    def load_state(self, taken: Tensor | None) -> None:
        """Restore what `state` returned. None: start at the beginning, unless another rank is further."""
        self._taken = 0 if taken is None else int(taken)
        self._agreed = False
