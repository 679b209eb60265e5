"""Codecs by layer group under a loss budget: the predicted gap of the loss with them, and the fastest ones within the
budget.

The gap of a mixture is predicted as the sum over the layer groups of the measured gap of the group's codec, weighted by
the group's share of the gradients' energy. This is an assumption: gaps were measured with one codec for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.plan.compression import Codec, DenseCodec, GroupCodec, Mixed, NoCompression
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, LayerGroup


def fastest_mixture(
    cost: CostModel, layout: Layout, codecs: Sequence[Codec], loss_budget: float, shares: Mapping[LayerGroup, float]
) -> Mixed | None:
    """Return the codecs by layer group with the shortest sums among those whose predicted gap is at most `loss_budget`
    and of which at least two differ. None: there are none, or the budget is 0 or infinite.

    Args:
        cost: cost model with the layout's memory options; its codec does not matter.
        codecs: the codecs to combine; those that no layer group can have, and those whose gap was not measured, are
            left out.
        loss_budget: allowed gap of the loss, as a share.
        shares: layer group -> its share of the gradients' energy.
    """
    if not 0 < loss_budget < math.inf:
        return None
    usable = [codec for codec in codecs if isinstance(codec, DenseCodec) and not math.isnan(_gap(codec))]
    seconds = {
        (group, codec.mode): _seconds(cost, layout, mixed({group: codec})) for group in LAYER_GROUPS for codec in usable
    }

    def taken_s(choice: Iterable[DenseCodec]) -> float:
        return sum(seconds[group, codec.mode] for group, codec in zip(LAYER_GROUPS, choice, strict=True))

    allowed = [
        choice
        for choice in product(usable, repeat=len(LAYER_GROUPS))
        if len({codec.mode for codec in choice}) > 1
        and sum(shares[group] * _gap(codec) for group, codec in zip(LAYER_GROUPS, choice, strict=True)) <= loss_budget
    ]
    if not allowed:
        return None
    best = mixed(dict(zip(LAYER_GROUPS, min(allowed, key=taken_s), strict=True)))
    assert isinstance(best, Mixed), "two codecs differ, so one of them compresses"
    return best


def mixed(codecs: Mapping[LayerGroup, DenseCodec]) -> Mixed | NoCompression:
    """Return the codec that sends each layer group by a codec of its own; groups that are not named are summed
    exactly."""
    groups = tuple(
        GroupCodec(mode=codec.mode, layers=group)
        for group, codec in codecs.items()
        if not isinstance(codec, NoCompression)
    )
    return Mixed(mode="mixed", groups=groups) if groups else NoCompression()


def predicted_gap(codec: Mixed, shares: Mapping[LayerGroup, float]) -> float:
    """Return the predicted gap of the loss to that of exact sums, as a share.

    Args:
        shares: layer group -> its share of the gradients' energy.
    """
    return sum(shares[group] * _gap(codec.codec_of(group)) for group in LAYER_GROUPS)


def gap_text(codec: Mixed, shares: Mapping[LayerGroup, float]) -> str:
    """Return the predicted gap in words, with the shares of energy from which it follows."""
    energy = ", ".join(f"{group} {share:.0%}" for group, share in shares.items())
    return f"predicted loss gap {predicted_gap(codec, shares):.2%}, from shares of the gradients' energy: {energy}"


def _gap(codec: DenseCodec) -> float:
    """Return the measured gap of a codec for all layers, at least 0; NaN if the loss may be higher and no gap was
    measured."""
    known = codec.model_copy(update={"layers": "all"}).loss_gap if not isinstance(codec, NoCompression) else None
    if known is None:
        return math.nan if codec.may_raise_loss else 0.0
    return max(0.0, known.share)


def _seconds(cost: CostModel, layout: Layout, codec: Codec) -> float:
    sums = cost.with_work(codec=codec).all_reduce_times(
        layout.placement, layout.model_parts, layout.rank_of_stage, layout.shards
    )
    return max(stage.seconds for stage in sums)
