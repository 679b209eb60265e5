"""How much the gradients of each layer vary from step to step: equation (2), one gradient after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import CheckpointError

_MEAN = "mean."
_SQUARES = "squares"
_SEEN = "seen"


class Moments:
    """Streaming variances (Welford 1962) of this rank's own gradients, averaged over the ranks when asked for.

    A rank's gradient has the noise of its own rows in it, which all layers share; in return nothing has to be sent
    to measure, and steps whose sums are compressed can be measured as well.

    Memory: as much as the gradients, while a profile is under way.
    """

    def __init__(self, layers: int) -> None:
        """
        Args:
            layers: how many tensors.
        """
        self.layers = layers
        self._seen = [0] * layers
        """Gradients of each tensor, in this profile."""
        self._means: dict[int, Tensor] = {}
        self._squares = torch.zeros(layers, dtype=torch.float64)
        """Sums of squared distances from the mean, as Welford updates them."""

    def observe(self, gradients: Sequence[Tensor], first: int = 0) -> None:
        """Take the gradients of a step into account; leave out those that are not finite on any rank.

        Args:
            gradients: [·] of [n_l], fp32, contiguous; unchanged.
            first: which tensor the first of them is of; the others follow it.

        Raises:
            CheckpointError: the profile, which was loaded, is of tensors of another size.
        """
        for layer, gradient in enumerate(gradients, first):
            self._seen[layer] += 1
            seen = self._seen[layer]
            mean = self._means.get(layer)
            if mean is None:
                mean = self._means[layer] = torch.zeros_like(gradient)
            elif mean.numel() != gradient.numel():
                raise CheckpointError(
                    f"profile of compressed tensor {layer}: found {mean.numel()} numbers for a gradient of "
                    f"{gradient.numel()}; allowed: a state saved with the same parallel degrees; drop it to start "
                    "afresh"
                )
            elif mean.device != gradient.device:
                mean = self._means[layer] = mean.to(gradient.device)
            # With d = g − old mean, and the new mean that plus d/t: (g − old)·(g − new) = (1 − 1/t)·d².
            distance = gradient - mean
            mean.add_(distance, alpha=1 / seen)
            self._squares[layer] += (1 - 1 / seen) * float(distance.norm()) ** 2

    def variances(self, group: dist.ProcessGroup, device: torch.device) -> list[float]:
        """σ² of each layer by equation (2), the mean over the ranks: the same bits on all of them. Collective.

        Args:
            group: the ranks.
            device: where the group's tensors lie.
        """
        # Rounded to fp32 before they are sent, because not every device sums in fp64.
        seen = torch.tensor(self._seen, dtype=torch.float64).clamp_min_(1)
        sums = (self._squares / seen).to(device, torch.float32)
        with ACTIVITY.doing("all-reduce over dp, variances", waits=True):
            dist.all_reduce(sums, group=group)
        world = dist.get_world_size(group)
        return [total / world for total in sums.tolist()]

    def restart(self) -> None:
        """Forget everything, and the memory for it."""
        self._seen = [0] * self.layers
        self._means.clear()
        self._squares.zero_()

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """What the profile has so far, under the tensors' positions; empty where none is under way."""
        seen = min(self._seen, default=0)
        if not seen:
            return {}
        means = {f"{_MEAN}{positions[layer]}": mean for layer, mean in self._means.items()}
        return {**means, _SQUARES: self._squares, _SEEN: torch.tensor(seen)}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        """Go on with what `state` gave; a profile of which anything is missing starts afresh."""
        self.restart()
        means = {layer: state.get(f"{_MEAN}{position}") for layer, position in enumerate(positions)}
        squares, seen = state.get(_SQUARES), state.get(_SEEN)
        if squares is None or seen is None or squares.numel() != self.layers:
            return
        if any(mean is None for mean in means.values()):
            return
        self._seen = [int(seen)] * self.layers
        self._squares = squares.detach().to("cpu", torch.float64, copy=True)
        self._means = {layer: mean.detach().clone() for layer, mean in means.items() if mean is not None}
