"""The steps at the beginning of a run whose gradients are summed exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class WarmUp:
    """Counts the steps of a run, alike on every rank, those that joined later included."""

    def __init__(self, group: dist.ProcessGroup, steps: int) -> None:
        self._group = group
        self._steps = steps
        self._taken = 0
        self._agreed = False

    @property
    def agreed(self) -> bool:
        """Whether the ranks know of each other how far they are; False until `over` was asked after a start."""
        return self._agreed

    @property
    def step(self) -> int:
        """The one that was counted last, 1 is the first."""
        return self._taken

    def over(self, device: torch.device) -> bool:
        """Count the step that begins; whether its gradients are compressed. Collective over the group.

        Args:
            device: of the gradients, where the group can send from.
        """
        if not self._agreed:
            # A rank without a memory takes the others' word: one that sends densely alone would wait for ever.
            taken = torch.tensor([self._taken], device=device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=self._group)
            self._taken = int(taken)
            self._agreed = True
        self._taken += 1
        return self._taken > self._steps

    def state(self) -> Tensor:
        """Steps taken so far."""
        return torch.tensor(self._taken)

    def load_state(self, taken: Tensor | None) -> None:
        """Go on behind a `state`; None: from the beginning, unless another rank knows better."""
        self._taken = 0 if taken is None else int(taken)
        self._agreed = False
