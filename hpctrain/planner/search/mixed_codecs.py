"""Codecs by layer group under a loss budget: the predicted gap of the loss with them, and the fastest ones within the
budget.

The gap with them is predicted as the sum over the layer groups of the measured gap of the group's codec, weighted by
the group's share of the gradients' energy. This is an assumption: gaps were measured with one codec for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.measured_gradients import GroupShares
from hpctrain.records.plan.compression import Codec, DenseCodec, GroupCodec, Mixed, NoCompression
from hpctrain.records.plan.layer_groups import LAYER_GROUPS, LayerGroup


@dataclass(frozen=True, eq=False)
class MixedChoice:
    """Codecs by layer group, with the reasons for them."""

    codec: Mixed
    predicted_gap: float
    """Predicted gap of the loss to that of exact sums, as a share."""
    reasons: dict[LayerGroup, str]
    """Layer group -> its codec, and why it has this codec."""


def fastest_mixed(
    cost: CostModel, layout: Layout, codecs: Sequence[Codec], loss_budget: float, shares: GroupShares
) -> MixedChoice | None:
    """Return the codecs by layer group with the shortest sums among those whose predicted gap is at most `loss_budget`
    and of which at least two differ. None: there are none, or the budget is 0 or infinite.

    Args:
        cost: cost model with the layout's memory options; its codec does not matter.
        codecs: the codecs to combine; those that no layer group can have, and those whose gap was not measured, are
            left out.
        loss_budget: allowed gap of the loss, as a share.
        shares: the shares of the gradients' energy.
    """
    if not 0 < loss_budget < math.inf:
        return None
    gaps: dict[str, float] = {codec.mode: _gap(codec) for codec in codecs if isinstance(codec, DenseCodec)}
    usable = [codec for codec in codecs if isinstance(codec, DenseCodec) and not math.isnan(gaps[codec.mode])]
    seconds = {
        (group, codec.mode): _seconds(cost, layout, mixed_codec({group: codec}))
        for group in LAYER_GROUPS
        for codec in usable
    }

    def taken_s(choice: Iterable[DenseCodec]) -> float:
        return sum(seconds[group, codec.mode] for group, codec in zip(LAYER_GROUPS, choice, strict=True))

    allowed = [
        choice
        for choice in product(usable, repeat=len(LAYER_GROUPS))
        if len({codec.mode for codec in choice}) > 1
        and _sum_of_gaps(dict(zip(LAYER_GROUPS, choice, strict=True)), gaps, shares) <= loss_budget
    ]
    if not allowed:
        return None
    best = dict(zip(LAYER_GROUPS, min(allowed, key=taken_s), strict=True))
    codec = mixed_codec(best)
    assert isinstance(codec, Mixed), "two codecs differ, so one of them compresses"
    reasons = {group: _reason(group, best, usable, gaps, loss_budget, shares) for group in LAYER_GROUPS}
    return MixedChoice(codec, _sum_of_gaps(best, gaps, shares), reasons)


def mixed_codec(codecs: Mapping[LayerGroup, DenseCodec]) -> Mixed | NoCompression:
    """Return the codec that sends each layer group by a codec of its own; groups that are not named are summed
    exactly."""
    groups = tuple(
        GroupCodec(mode=codec.mode, layers=group)
        for group, codec in codecs.items()
        if not isinstance(codec, NoCompression)
    )
    return Mixed(mode="mixed", groups=groups) if groups else NoCompression()


def _sum_of_gaps(codecs: Mapping[LayerGroup, DenseCodec], gaps: Mapping[str, float], shares: GroupShares) -> float:
    """Return the predicted gap of the loss with a codec for each layer group.

    Args:
        gaps: mode of a codec -> its gap if it sends all layers.
    """
    return sum(shares.shares[group] * gaps[codec.mode] for group, codec in codecs.items())


def _reason(
    group: LayerGroup, chosen: Mapping[LayerGroup, DenseCodec], usable: Sequence[DenseCodec],
    gaps: Mapping[str, float], loss_budget: float, shares: GroupShares,
) -> str:  # fmt: skip
    """Return the codec of a layer group, what it adds to the predicted gap, and why no codec with fewer bytes was
    chosen."""
    codec, share = chosen[group], shares.shares[group]
    whole, gap = "energy" if shares.measured else "parameters", gaps[codec.mode]
    product_text = f"{percent(share)} of the {whole} × {percent(gap)} = {percent(share * gap)}"
    text = f"{codec.mode}, predicted gap {product_text}"
    smaller = [other for other in usable if other.dense_bytes < codec.dense_bytes]
    if not smaller:
        return f"{text}; no codec sends fewer bytes"
    following = max(smaller, key=lambda other: other.dense_bytes)
    whole_gap = _sum_of_gaps({**chosen, group: following}, gaps, shares)
    if whole_gap <= loss_budget:
        return f"{text}; {following.mode} would not be faster"
    return f"{text}; {following.mode} would make the sum {percent(whole_gap)}"


def percent(share: float) -> str:
    """Return a share as text: '0.39 %' for 0.0039."""
    return f"{100 * share:.3g} %"


def _gap(codec: DenseCodec) -> float:
    """Return the measured gap of a codec, at least 0; NaN if the loss may be higher and no gap was measured."""
    known = codec.loss_gap
    if known is None:
        return math.nan if codec.may_raise_loss else 0.0
    return max(0.0, known.share)


def _seconds(cost: CostModel, layout: Layout, codec: Codec) -> float:
    sums = cost.with_work(codec=codec).all_reduce_times(
        layout.placement, layout.model_parts, layout.rank_of_stage, layout.shards
    )
    return max(stage.seconds for stage in sums)
