"""Chooses the codecs of stage messages: the most exact ones, unless less exact ones are faster by a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.model import CostModel, crosses_nodes
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.codecs.codec_choice import min_gain
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.gradient_codec import MESSAGES, Messages


@dataclass(frozen=True, eq=False)
class MessageCodecChoice:
    """The codecs of a layout's stage messages, and the predicted step."""

    messages: tuple[Messages, ...]
    """[stage] -> codec of the messages to the next stage."""
    prediction: Prediction
    reason: str | None
    """Why these codecs were chosen, as a sentence; None if no message leaves a node."""


def choose_messages(cost: CostModel, layout: Layout, lossy: bool) -> MessageCodecChoice:
    """Choose the codec of each stage boundary by the thresholds that also decide on gradient codecs.

    Codecs become available one after the other, the most exact first. Every boundary takes the available codec that
    delivers its messages the soonest. The result is accepted if it shortens the step by `MIN_GAIN` or `MIN_LOSSY_GAIN`.

    Args:
        cost: cost model with the layout's memory options and gradient codec; its message codecs do not matter.
        lossy: whether int8 is allowed.
    """
    full: Messages = "none"
    exact = (full,) * len(layout.blocks)
    chosen = exact, _predicted(cost, layout, exact)
    before_s = chosen[1].total
    if not any(crosses_nodes(a, b) for replica in layout.placement.representatives for a, b in _hops(layout, replica)):
        return MessageCodecChoice(*chosen, None)
    allowed = [full]
    for encoding, properties in MESSAGES.items():
        if encoding == full or (properties.lossy and not lossy):
            continue
        allowed.append(encoding)
        messages = tuple(_soonest(cost, layout, stage, allowed) for stage in range(len(layout.blocks)))
        prediction = _predicted(cost, layout, messages)
        if 1 - prediction.total / chosen[1].total >= min_gain(properties.lossy):
            chosen = messages, prediction
    if chosen[0] == exact:
        return MessageCodecChoice(
            *chosen, f"Messages between stages travel in fp32: in {' or '.join(allowed[1:])} too little is won."
        )
    names = " and ".join(dict.fromkeys(encoding for encoding in chosen[0] if encoding != full))
    return MessageCodecChoice(
        *chosen,
        f"Messages between stages on different nodes travel in {names}: a step of "
        f"{format_seconds(chosen[1].total)}, in fp32 {format_seconds(before_s)}.",
    )


def _predicted(cost: CostModel, layout: Layout, messages: tuple[Messages, ...]) -> Prediction:
    return predict(cost.with_work(replace(cost.work, messages=messages)), layout, whole=True)


def _soonest(cost: CostModel, layout: Layout, stage: int, allowed: Sequence[Messages]) -> Messages:
    """Return the codec with which the messages between a stage and the next arrive the soonest, in the slowest
    replica.
    """
    if stage == len(layout.blocks) - 1:
        return "none"
    pairs = [_hops(layout, replica)[stage] for replica in layout.placement.representatives]
    pairs = [(a, b) for a, b in pairs if crosses_nodes(a, b)]

    def seconds(encoding: Messages) -> float:
        size = layout.micro_batch
        return max(
            cost.send_s(a, b, size, encoding)
            + cost.send_s(b, a, size, encoding)
            + 2 * (cost.message_cast_s(a, size, encoding) + cost.message_cast_s(b, size, encoding))
            for a, b in pairs
        )

    return min(allowed, key=seconds) if pairs else "none"


def _hops(layout: Layout, replica: int) -> list[tuple[TensorParallelGroup, TensorParallelGroup]]:
    """[stage] -> (its tensor-parallel group, the group of the next stage), for one replica."""
    return list(pairwise(layout.unit(replica, stage) for stage in range(len(layout.blocks))))
