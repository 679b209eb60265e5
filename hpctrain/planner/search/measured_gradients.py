"""What was measured of a run's gradients, for mode auto with `lossy: true` or a `loss_budget`: whether a sparse codec
would lose too much, how many numbers mode adaptive would send, and which share of the energy each layer group has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.planner.cost.workload import ModelPart, Workload
from hpctrain.records.history.layer_figures import KEPT_DENSITY, LayerFigures
from hpctrain.records.plan.compression import Adaptive, Codec, TopK
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, LayerGroup
from hpctrain.records.plan.sparsity import sparsities

LEAST_ENERGY_KEPT = 0.3
"""Least share of the gradients' energy that must arrive with the density of mode topk, as mean over the layers by the
size of their variance. It is an assumption: no training was measured whose gradients keep less."""


def why_loses_too_much(codec: Codec, layers: Sequence[LayerFigures]) -> str | None:
    """Return why the gradients that were measured do not allow a codec; None if they do, or nothing was measured.

    Args:
        layers: figures of the run's layers, over all ranks; empty before they are measured.
    """
    if not isinstance(codec, TopK) or codec.density > KEPT_DENSITY:
        return None
    known = [
        (layer.energy_kept, layer.gradient_variance * layer.numbers)
        for layer in layers
        if layer.energy_kept is not None and layer.gradient_variance is not None
    ]
    energy = sum(weight for _, weight in known)
    if energy <= 0:
        return None
    arriving = sum(share * weight for share, weight in known) / energy
    if arriving >= LEAST_ENERGY_KEPT:
        return None
    return f"{arriving:.0%} of the gradients' energy would arrive, as measured, and {LEAST_ENERGY_KEPT:.0%} are needed"


def adaptive_codec(layers: Sequence[LayerFigures], warmup_steps: int) -> Adaptive | None:
    """Return mode adaptive with its default settings, which can be chosen once the variances of layers are measured, as
    they decide how much it sends; None before.

    Args:
        layers: figures of the run's layers, over all ranks.
        warmup_steps: steps in which the codec measures variances by itself.
    """
    known = [layer for layer in layers if layer.gradient_variance is not None]
    return Adaptive(mode="adaptive", warmup_steps=max(1, warmup_steps)) if len(known) > 1 else None


def priced_codec(codec: Codec, layers: Sequence[LayerFigures]) -> Codec:
    """Return the codec whose time and bytes are those of `codec` for gradients with the measured variances: for mode
    adaptive, mode topk with the density of all layers together; any other codec unchanged."""
    known = [(layer.gradient_variance, layer.numbers) for layer in layers if layer.gradient_variance is not None]
    if not isinstance(codec, Adaptive) or not known:
        return codec
    sizes = [numbers for _, numbers in known]
    totals = [variance * numbers for variance, numbers in known]
    shares = sparsities(totals, sizes, codec.limits, codec.mapping, codec.form)
    density = sum((1 - share) * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
    settings = codec.model_dump(
        include={"layers", "feedback", "beta", "residual", "warmup_steps", "selector", "values"}
    )
    return TopK.model_validate({"mode": "topk", "density": density, **settings})


class GroupShares(NamedTuple):
    """What mode auto takes for the shares of the gradients' energy that the layer groups have. Energy is the sum of the
    variances of a group's numbers."""

    shares: dict[LayerGroup, float]
    """Layer group -> its share."""
    measured: bool
    """Whether the energy was measured. If not, the shares are those of the model's parameters."""


def group_shares(work: Workload, layers: Sequence[LayerFigures]) -> GroupShares:
    """Return the shares of the layer groups.

    Args:
        layers: figures of the run's layers, over all ranks; empty before they are measured.
    """
    energies: dict[LayerGroup, float] = dict.fromkeys(LAYER_GROUPS, 0.0)
    for layer in layers:
        if layer.gradient_variance is None or layer.attention_share is None:
            continue
        energy = layer.gradient_variance * layer.numbers
        outside: LayerGroup = "feed_forward" if layer.layer.isdecimal() else "embedding_head"
        energies["attention"] += layer.attention_share * energy
        energies[outside] += (1 - layer.attention_share) * energy
    measured = all(energies.values())
    weights = energies if measured else work.group_parameters(ModelPart(work.spec.layers, first=True, last=True), 1)
    whole = sum(weights.values())
    return GroupShares({group: weight / whole for group, weight in weights.items()}, measured)
