"""What this rank measures of each layer: its gradients, from a sample of their numbers, and its time, if asked for.

Figures are taken in one step of ten or more, so that they cost next to nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpctrain.model.imported.model import blocks_of
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.stage import Mark, mark, seconds_between
from hpctrain.records.history.layer_figures import KEPT_DENSITY, LayerFigures
from hpctrain.records.plan.layer_groups import in_attention

SAMPLE = 4096
"""Most numbers of a layer's gradient in a sample. For each parameter, one more is possible."""
DECAY = 0.1
"""Least weight of the newest gradient in the mean and the variance over steps, which so follow the training."""
WINDOW = 16
"""Most gradients over which error feedback is followed."""
LEAST_WINDOW = 4
"""Fewest gradients after which the energy that feedback keeps is known."""
ENERGY = 0.9
"""Share of a gradient's squared norm that `LayerFigures.gradient_density` is about."""


class LayerWatch:
    """The layers of this rank: blocks by number, and other parts by name."""

    def __init__(self, pipeline: Pipeline, has_times: bool) -> None:
        """Find the layers; no figures are taken.

        Args:
            pipeline: the stages that this rank holds.
            has_times: whether the time of each block is measured.
        """
        blocks = {str(number): block for stage in pipeline.stages for number, block in _blocks(stage.submod)}
        block_of = {id(weight): name for name, block in blocks.items() for weight in block.parameters()}
        self._layers: dict[str, list[int]] = {}
        self._in_attention = [in_attention(name) for name, _ in pipeline.parameters()]
        for index, (name, weight) in enumerate(pipeline.parameters()):
            self._layers.setdefault(block_of.get(id(weight), name.rpartition(".")[0] or name), []).append(index)
        self._times = BlockTimes(blocks, pipeline.device) if has_times else None
        self._numbers: dict[str, int] = {}
        self._history: SampledGradients | None = None
        self._sample: tuple[Tensor, list[list[int]]] | None = None

    def recorded_times(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that measures the time of each block during its `with` block, if asked for."""
        return contextlib.nullcontext() if self._times is None else self._times.recorded()

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Take a sample of the gradients of a step. A GPU copies it later, so nothing waits here.

        Args:
            gradients: those of `Pipeline.parameters`, in the same order.
        """
        parts, sizes = [], []
        for name, indices in self._layers.items():
            self._numbers[name] = sum(gradients[index].numel() for index in indices)
            stride = -(-self._numbers[name] // SAMPLE) | 1  # an odd one meets all columns of a matrix
            taken = [gradients[index].detach().reshape(-1)[::stride] for index in indices]
            parts += taken
            sizes.append([part.numel() for part in taken])
        self._sample = torch.cat(parts).float(), sizes

    def take(self) -> list[LayerFigures]:
        """Return the figures of each layer after a step whose gradients were observed."""
        times = {} if self._times is None else self._times.take()
        gradients: list[dict[str, float]] = [{} for _ in self._layers]
        if self._sample is not None:
            sample, sizes = self._sample
            self._sample, values = None, sample.cpu()
            if self._history is None:
                marks = [self._in_attention[index] for indices in self._layers.values() for index in indices]
                self._history = SampledGradients(sizes, marks)
            if bool(values.isfinite().all()):
                gradients = self._history.add(values)
        return [
            LayerFigures.model_validate(
                {"layer": name, "numbers": self._numbers.get(name, 0), **figures, **times.get(name, {})}
            )
            for name, figures in zip(self._layers, gradients, strict=True)
        ]


def _blocks(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    yield from blocks_of(module).items()


class SampledGradients:
    """Mean, variance and error feedback of the sampled numbers of each layer's gradient, over the sampled steps."""

    def __init__(self, sizes: Sequence[Sequence[int]], in_attention: Sequence[bool]) -> None:
        """Begin without gradients.

        Args:
            sizes: sampled numbers of each parameter of each layer.
            in_attention: for each parameter of all layers, one after the other, whether it is one of attention.
        """
        self._sizes, counts = [sum(layer) for layer in sizes], [count for layer in sizes for count in layer]
        total = sum(counts)
        self._in_attention = torch.tensor(in_attention, dtype=torch.bool).repeat_interleave(
            torch.tensor(counts, dtype=torch.int64)
        )
        self._mean, self._variance = torch.zeros(total), torch.zeros(total)
        self._seen = 0
        self._sum, self._residual = torch.zeros(total), torch.zeros(total)
        self._window = 0

    def add(self, sample: Tensor) -> list[dict[str, float]]:
        """Add the gradients of a step, and return the figures of each layer that are known, by their names in
        `LayerFigures`.

        Args:
            sample: [numbers], fp32, finite: the sampled numbers of all layers.
        """
        self._seen += 1
        weight = max(1 / self._seen, DECAY)
        difference = sample - self._mean
        self._mean += weight * difference
        # Welford 1962, with weights that decrease geometrically once there are 1 / DECAY gradients.
        self._variance = (1 - weight) * (self._variance + weight * difference**2)
        if self._window == WINDOW:
            self._window = 0
            self._sum.zero_()
            self._residual.zero_()
        self._window += 1
        self._sum += sample
        self._residual += sample
        layers = zip(*(tensor.split(self._sizes) for tensor in self._tensors(sample)), strict=True)
        return [self._figures(*layer) for layer in layers]

    def _tensors(self, sample: Tensor) -> tuple[Tensor, ...]:
        return sample, self._variance, self._in_attention, self._sum, self._residual

    def _figures(
        self, sample: Tensor, variance: Tensor, in_attention: Tensor, total: Tensor, residual: Tensor
    ) -> dict[str, float]:
        """Return the figures of a layer, and set the largest numbers of its residual to 0, in place, as if they were
        sent."""
        figures: dict[str, float] = {}
        squares = sample.square().sort(descending=True).values.double().cumsum(0)
        if len(sample) == 0:
            return figures
        if float(squares[-1]) > 0:
            figures["gradient_density"] = (int((squares < ENERGY * squares[-1]).sum()) + 1) / len(sample)
        if self._seen > 1:
            figures["gradient_variance"] = float(variance.double().mean())
            if (energy := float(variance.double().sum())) > 0:
                figures["attention_share"] = float(variance[in_attention].double().sum()) / energy
        count = math.ceil(KEPT_DENSITY * len(sample))
        residual[residual.abs().topk(count).indices] = 0.0
        whole = float(total.double().square().sum())
        if self._window >= LEAST_WINDOW and whole > 0:
            figures["energy_kept"] = max(0.0, 1 - float(residual.double().square().sum()) / whole)
        return figures


class BlockTimes:
    """Seconds of the forward and the backward pass of each block, by hooks that exist in measured steps only.

    A backward pass counts from the gradient of the block's output to that of its input. What a schedule computes later
    (gradients of weights, where it splits backward passes) does not count.
    """

    def __init__(self, blocks: dict[str, nn.Module], device: torch.device) -> None:
        self._blocks, self._device = blocks, device
        self._spans: list[tuple[str, str, Mark, Mark]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Measure during the `with` block."""
        with contextlib.ExitStack() as stack:
            for name, block in self._blocks.items():
                before, after = self._hooks(name, "forward_s")
                handles = [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
                before, after = self._hooks(name, "backward_s")
                handles += [block.register_full_backward_pre_hook(before), block.register_full_backward_hook(after)]
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def _hooks(
        self, name: str, part: Literal["forward_s", "backward_s"]
    ) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
        started: list[Mark] = []

        def before(*_: Any) -> None:
            started.append(mark(self._device))

        def after(*_: Any) -> None:
            if started:
                self._spans.append((name, part, started.pop(), mark(self._device)))

        return before, after

    def take(self) -> dict[str, dict[str, float]]:
        """Return block -> name of a time -> seconds, since the last call; {} if nothing was measured."""
        spans, self._spans = self._spans, []
        times: dict[str, dict[str, float]] = {}
        for name, part, start, end in spans:
            seconds = times.setdefault(name, {})
            seconds[part] = seconds.get(part, 0.0) + seconds_between(start, end)
        return times
