"""The variance of each layer's gradients over the steps, equation (2) of the paper, computed as a stream."""

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
    """Streaming variances (Welford 1962) of this rank's gradients; `variances` averages them over the ranks.

    The gradient of one rank is noisier than the sum over ranks, but equally so for all layers. In return, measuring
    sends nothing, and steps with compressed sums can be measured too.

    While a variance profile is measured, this takes as much memory as the gradients.
    """

    def __init__(self, layers: int) -> None:
        """
        Args:
            layers: number of tensors.
        """
        self.layers = layers
        self._seen = [0] * layers
        """Number of gradients of each tensor that this profile has observed."""
        self._means: dict[int, Tensor] = {}
        self._squares = torch.zeros(layers, dtype=torch.float64)
        """Sums of squared distances from the mean, as Welford updates them."""

    def observe(self, gradients: Sequence[Tensor], first: int = 0) -> None:
        """Add the gradients of a step to the profile. Call it only for gradients that are finite on all ranks.

        Args:
            gradients: each [n_l], fp32, contiguous; unchanged.
            first: index of the first gradient's tensor; the other gradients belong to the tensors after it.

        Raises:
            CheckpointError: the loaded profile is of tensors of another size.
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
            # With d = g − old mean and new mean = old mean + d/t: (g − old mean)·(g − new mean) = (1 − 1/t)·d².
            distance = gradient - mean
            mean.add_(distance, alpha=1 / seen)
            self._squares[layer] += (1 - 1 / seen) * float(distance.norm()) ** 2

    def variances(self, group: dist.ProcessGroup, device: torch.device) -> list[float]:
        """Return the variance σ² of each layer by equation (2), averaged over the ranks; the same bits on all.
        Collective.

        Args:
            group: the ranks.
            device: device of the group's tensors.
        """
        # Sent in fp32, because not every device sums in fp64.
        seen = torch.tensor(self._seen, dtype=torch.float64).clamp_min_(1)
        sums = (self._squares / seen).to(device, torch.float32)
        with ACTIVITY.doing("all-reduce over dp, variances", waits=True):
            dist.all_reduce(sums, group=group)
        world = dist.get_world_size(group)
        return [total / world for total in sums.tolist()]

    def restart(self) -> None:
        """Drop the profile and free its memory."""
        self._seen = [0] * self.layers
        self._means.clear()
        self._squares.zero_()

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the unfinished profile, keyed by the tensors' positions; empty if there is none."""
        seen = min(self._seen, default=0)
        if not seen:
            return {}
        means = {f"{_MEAN}{positions[layer]}": mean for layer, mean in self._means.items()}
        return {**means, _SQUARES: self._squares, _SEEN: torch.tensor(seen)}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        """Restore what `state` returned; an incomplete profile starts afresh."""
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
