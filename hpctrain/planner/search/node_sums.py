"""Chooses whether the replicas of a node sum gradients first, and how, for a layout and a codec."""

from __future__ import annotations

import math
from typing import Literal, get_args

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.gradient_codec import IntraNode


def choose_node_sums(cost: CostModel, layout: Layout, asked: IntraNode | Literal["auto"], min_gain: float) -> CostModel:
    """Return the cost model with the way in which the replicas of a node sum gradients before the codec sums over the
    nodes.

    With auto, the ways are tried in the order flat, none, bf16, if several nodes have equally many replicas, two or
    more, and the codec can sum by level; else the way is flat.

    Args:
        cost: the cost model with the layout's memory options and gradient codec.
        asked: the way of the run file; auto: the planner chooses.
        min_gain: least share of a step that the next way has to save to be taken.
    """
    codec, ways = cost.work.codec, [asked if asked != "auto" else "flat"]
    by_level = codec.sums_gradients and (layout.shards < layout.dp or codec.sharded_sums == "all")
    if asked == "auto" and layout.level_replicas > 1 and by_level:
        ways = list(get_args(IntraNode))
    chosen, *others = (cost.with_work(intra_node=way) for way in ways)
    best_s = predict(chosen, layout, whole=True).total if others else math.inf
    for other in others:
        step_s = predict(other, layout, whole=True).total
        if 1 - step_s / best_s >= min_gain and layout.memory_shortage(other.memory) is None:
            chosen, best_s = other, step_s
    return chosen
