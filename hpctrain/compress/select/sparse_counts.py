"""Decides how many numbers of each tensor every rank sends in a step: one density for all tensors, or a higher density
for tensors whose gradients vary more over the steps.

The variance of each layer's gradients over the steps, equation (2) of the paper, is computed as the steps run;
`records/plan/sparsity.py` turns variances into counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import CheckpointError
from hpctrain.records.plan.compression import Adaptive
from hpctrain.records.plan.sparsity import counts, sparsities

_MEAN = "mean."
_SQUARES = "squares"
_SEEN = "seen"


class Moments:
    """Variance profile: the variances of this rank's gradients, updated step by step (Welford 1962).

    The gradient of one rank is noisier than the sum over ranks, but equally so for all layers. In return, `observe`
    sends nothing, and steps with compressed sums can be measured too. Only `variances`, which averages the variances
    over the ranks, sends a message. While a profile is measured, it takes as much memory as the gradients.
    """

    def __init__(self, layers: int) -> None:
        """Begin a variance profile without any gradients.

        Args:
            layers: number of tensors whose gradients are measured.
        """
        self.layers = layers
        self._seen = [0] * layers
        """For each tensor, the count of gradients that the profile has observed."""
        self._means: dict[int, Tensor] = {}
        self._squares = torch.zeros(layers, dtype=torch.float64)
        """For each tensor, the sum of squared distances from the mean, as Welford updates it."""

    def observe(self, gradients: Sequence[Tensor], first: int = 0) -> None:
        """Add gradients of a step to the variance profile. Call it only for gradients that are finite on all ranks.

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
        """Return the variance σ² of each tensor by equation (2) of the paper, averaged over the ranks. Collective over
        the group.

        All ranks get the same bits.

        Args:
            group: the ranks.
            device: device of the group's tensors.
        """
        # Sent in fp32, because not every device sums in fp64.
        seen = torch.tensor(self._seen, dtype=torch.float64).clamp_min_(1)
        sums = (self._squares / seen).to(device, torch.float32)
        with ACTIVITY.doing("all-reduce over dp, variances", waits="dp"):
            dist.all_reduce(sums, group=group)
        world = dist.get_world_size(group)
        return [total / world for total in sums.tolist()]

    def restart(self) -> None:
        """Drop what this variance profile has observed, free the memory and begin anew."""
        self._seen = [0] * self.layers
        self._means.clear()
        self._squares.zero_()

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the unfinished variance profile as key -> tensor: means, squared distances, count of steps. It is
        empty until each tensor's gradient was observed.

        Args:
            positions: for each tensor, the number that names it in the keys, as in 'mean.3'.
        """
        seen = min(self._seen, default=0)
        if not seen:
            return {}
        means = {f"{_MEAN}{positions[layer]}": mean for layer, mean in self._means.items()}
        return {**means, _SQUARES: self._squares, _SEEN: torch.tensor(seen)}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        """Restore the variance profile that `state` returned; an incomplete one starts afresh.

        Args:
            state: the entries that `state` returned.
            positions: for each tensor, the number that names it in the keys, as given to `state`.
        """
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


_SPARSITY = "sparsity."
_UNKNOWN = -1.0


class SendCounts:
    """Decides how many numbers of each tensor every rank sends in a step: the same density for every tensor, all
    numbers in warm-up steps.

    The counts are equal on all ranks. A subclass may observe gradients and hold state; this class does neither.
    """

    def __init__(self, group: dist.ProcessGroup, density: float, warmup_steps: int) -> None:
        """Set the density and the number of warm-up steps.

        Args:
            group: the ranks over which gradients are summed.
            density: share of the numbers that is sent, above 0, at most 1.
            warmup_steps: number of first steps in which all numbers are sent.
        """
        self._group = group
        self._density = density
        self._warmup_steps = warmup_steps

    def of(self, step: int, sizes: Sequence[int]) -> list[int] | None:
        """Return how many numbers of each tensor every rank sends in a step; None: all numbers.

        Args:
            step: number of the step, counted from 1.
            sizes: count of numbers of each tensor.
        """
        return None if step <= self._warmup_steps else counts([1 - self._density] * len(sizes), sizes)

    def agree(self, step: int, device: torch.device) -> int:
        """Return the number of done steps from which all ranks continue: the smallest `step` of any rank, because ranks
        may have loaded different states. In mode adaptive it is 0 if the warm-up is over but a rank has no sparsities;
        all ranks then measure them again. Collective over the group.

        Args:
            step: number of steps done, as this rank loaded it.
            device: device of the group's tensors.
        """
        return int(_least([float(step)], self._group, device)[0])

    def watches(self, step: int) -> bool:
        """Return whether `observe` needs the gradients of this step, counted from 1."""
        return False

    def observe(self, step: int, gradients: Sequence[Tensor], first: int = 0) -> None:
        """Observe this rank's gradients of a step, all in one call or a few tensors in each call.

        Call it only for gradients that are finite on all ranks.

        Args:
            step: number of the step, counted from 1.
            gradients: gradients of compressed tensors, flat, fp32.
            first: index, among the compressed tensors, of the first gradient's tensor.

        Raises:
            CheckpointError: with mode adaptive, the loaded profile is of tensors of another size.
        """

    def close(self, step: int, sizes: Sequence[int], device: torch.device) -> None:
        """End a step, after all its gradients were observed.

        With mode adaptive, the call is collective in the steps that complete a variance profile, which is the variance
        of each tensor's gradients over some steps.

        Args:
            step: number of the step, counted from 1.
            sizes: count of numbers of each tensor.
            device: device of the group's tensors.
        """

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return what a subclass has to keep from one step to the next, as key -> tensor; here nothing.

        Args:
            positions: for each tensor, the number that names it in the keys, as in 'sparsity.3'.
        """
        return {}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        """Restore what `state` returned, with the same `positions`; entries that are missing start as in a new run."""


class AdaptiveSendCounts(SendCounts):
    """Decides how many numbers of each tensor every rank sends in a step, by the variance of the tensor's gradients
    (equations 2 to 4 of the paper).

    The variances are measured over the first `warmup_steps` steps, and again every `reprofile_every` steps (settings of
    the codec).
    """

    def __init__(self, group: dist.ProcessGroup, layers: int, codec: Adaptive) -> None:
        """Begin to measure the variances, still without any gradients.

        Args:
            group: the ranks over which variances are combined, and which send the same counts.
            layers: number of compressed tensors.
            codec: the settings.
        """
        self._group = group
        self._codec = codec
        self._moments = Moments(layers)
        self.sparsity: list[float] | None = None
        """The sparsity s of each tensor; None before the first profile is complete."""

    def watches(self, step: int) -> bool:
        return self._passed(step) <= self._codec.warmup_steps

    def observe(self, step: int, gradients: Sequence[Tensor], first: int = 0) -> None:
        if self.watches(step):
            self._moments.observe(gradients, first)

    def close(self, step: int, sizes: Sequence[int], device: torch.device) -> None:
        if self._passed(step) == self._codec.warmup_steps:
            variances = self._moments.variances(self._group, device)
            self.sparsity = sparsities(variances, sizes, self._codec.limits, self._codec.mapping, self._codec.form)
            self._moments.restart()

    def _passed(self, step: int) -> int:
        """Return the number of step `step`, counted from 1 at the first step of the last measurement of variances."""
        warmup, every = self._codec.warmup_steps, self._codec.reprofile_every
        return step if every is None else (step - 1) % max(every, warmup) + 1

    def of(self, step: int, sizes: Sequence[int]) -> list[int] | None:
        if step <= self._codec.warmup_steps or self.sparsity is None:
            return None
        return counts(self.sparsity, sizes)

    def agree(self, step: int, device: torch.device) -> int:
        known = self.sparsity or [_UNKNOWN] * self._moments.layers
        least, *sparsity = _least([float(step), *known], self._group, device)
        self.sparsity = None if min(sparsity) < 0 else sparsity
        if self.sparsity is None and least >= self._codec.warmup_steps:
            # The profile is complete, but some rank lacks its result: measure again.
            least = 0
        if least != step:
            self._moments.restart()
        return int(least)

    def state(self, positions: Sequence[int]) -> dict[str, Tensor]:
        shares = {
            f"{_SPARSITY}{position}": torch.tensor(share, dtype=torch.float64)
            for position, share in zip(positions, self.sparsity or [], strict=False)
        }
        return {**shares, **self._moments.state(positions)}

    def load_state(self, state: dict[str, Tensor], positions: Sequence[int]) -> None:
        shares = [state.get(f"{_SPARSITY}{position}") for position in positions]
        known = [float(share) for share in shares if share is not None]
        self.sparsity = known if len(known) == len(positions) else None
        self._moments.load_state(state, positions)


def _least(numbers: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the minimum of each number over the ranks. Collective."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    least: list[float] = tensor.tolist()
    return least
