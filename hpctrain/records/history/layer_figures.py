"""Figures of one layer on one rank: a part of a line of metrics-ranks.jsonl. Figures of a layer over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.records.format.document import Part

KEPT_DENSITY = 0.07
"""Share of a layer's numbers that is sent in `LayerFigures.energy_kept`: the density of mode topk if the planner
chooses it."""


class LayerFigures(Part):
    """What a rank measured of the part of a layer that it holds, from a sample of 4096 numbers of its gradient at most.

    The gradient is the sum over replicas, if the run's codec sends all numbers; else the rank's own before it is
    compressed. A figure that is not known yet is absent.
    """

    layer: str
    """Number of a block in the whole model, from 0, or the name of another part: embedding, norm, head."""
    numbers: int
    """Numbers of the gradient that the rank holds."""
    gradient_variance: float | None = None
    """Variance of a number of the gradient over the measured steps, as mean over the layer: equation (2) of the paper
    (Sun 2026) divided by the layer's size. Newer steps have more weight."""
    gradient_density: float | None = None
    """Smallest share of the layer's numbers that has 90 % of the squared norm of its gradient."""
    energy_kept: float | None = None
    """Share of the squared norm of the gradients' sum that arrives if the largest 7 % of the numbers are sent in each
    measured step and the others are added to the next gradient. The sum is over 4 to 16 measured steps."""
    attention_share: float | None = None
    """Share that the parameters of attention have of the sum of the variances of the layer's numbers."""
    forward_s: float | None = None
    """Seconds of the block's forward passes in the last step that the line is about; only with `profile.layers`."""
    backward_s: float | None = None
    """Seconds of the block's backward passes in the last step that the line is about; only with `profile.layers`."""


def layers_of_ranks(ranks: Iterable[Sequence[LayerFigures]]) -> list[LayerFigures]:
    """Return the figures of each layer over all ranks, in the order in which ranks hold layers.

    Figures of gradients are means over the numbers that the ranks hold, `numbers` is the largest of a rank, and times
    are those of the slowest rank.

    Args:
        ranks: the layers of each rank, of the same step.
    """
    parts: dict[str, list[LayerFigures]] = {}
    for layers in ranks:
        for layer in layers:
            parts.setdefault(layer.layer, []).append(layer)
    return [
        LayerFigures(
            layer=name,
            numbers=max(part.numbers for part in held),
            gradient_variance=_mean([(part.gradient_variance, part.numbers) for part in held]),
            gradient_density=_mean([(part.gradient_density, part.numbers) for part in held]),
            energy_kept=_mean([(part.energy_kept, part.numbers) for part in held]),
            attention_share=_mean([(part.attention_share, part.numbers) for part in held]),
            forward_s=max((part.forward_s for part in held if part.forward_s is not None), default=None),
            backward_s=max((part.backward_s for part in held if part.backward_s is not None), default=None),
        )
        for name, held in parts.items()
    ]


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the weighted mean of the values that are there; None without one.

    Args:
        values: (value, weight) of each rank.
    """
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
