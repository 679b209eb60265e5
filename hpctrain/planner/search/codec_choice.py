"""Chooses the codecs of gradients and of stage messages for a layout. Codecs are tried in the order of
`candidate_codecs` and `MESSAGES`, from fp32 on. A codec replaces the one chosen so far if it shortens the step by at
least a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.collectives import AllReduceTime, low_rank_width
from hpctrain.planner.cost.model import CostModel, crosses_nodes
from hpctrain.planner.devices.tensor_parallel_group import TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.search.measured_gradients import adaptive_codec, group_shares, priced_codec, why_loses_too_much
from hpctrain.planner.search.mixed_codecs import fastest_mixed, percent
from hpctrain.planner.search.node_sums import choose_node_sums
from hpctrain.planner.simulate.gradient_sums import overlapped_s
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.plan.codec_spec import CodecFigures, CodecSpec
from hpctrain.records.plan.compression import (
    CODECS,
    Adaptive,
    AutoCompression,
    Codec,
    Mixed,
    NoCompression,
    make_codec,
)
from hpctrain.records.plan.gradient_codec import MESSAGES, IntraNode, Messages
from hpctrain.records.plan.low_rank import WARMUP_SHARE
from hpctrain.schedule.runnable import (
    WHY_NOT_LOSS_SCALED,
    WHY_NOT_PER_MICRO_BATCH,
    WHY_NOT_SHARDED,
    reduces_each_micro_batch,
)

MIN_GAIN = 0.03
"""Least share of a step that a codec must save to be chosen, if with it the training loss stays that of exact sums.

So the chosen codec is at most this much slower than the fastest of these codecs.
"""
MIN_LOSSY_GAIN = 0.1
"""Least share of a step that a codec with which the loss may be higher must save to be chosen.

It is larger than `MIN_GAIN`, because predicted times have errors and the loss may fall more slowly.
"""
MAX_WARMUP = 100
"""Largest number of warm-up steps of low-rank and sparse codecs in mode auto.

With a tenth of the steps, exact steps would take most of the time of a long run on a slow link.
"""


@dataclass(frozen=True, eq=False)
class CodecDecision:
    """The codec with which a layout's gradients are summed, and the predicted step."""

    spec: CodecSpec
    prediction: Prediction
    """The prediction of a step after the warm-up steps."""
    mean_step_s: float
    """Mean seconds of a step over the run, including the warm-up steps."""
    intra_node: IntraNode = "flat"
    """How the replicas of a node sum gradients first."""


@dataclass(frozen=True, eq=False)
class _CodecTrial:
    codec: Codec
    intra_node: IntraNode
    prediction: Prediction
    sum: AllReduceTime | None
    """The all-reduce of the stage whose all-reduce takes longest; None if ZeRO over all replicas sums within the
    backward pass."""
    overlapped_s: float
    mean_step_s: float


def candidate_codecs(steps: int, loss_limit: float, layers: Sequence[LayerFigures] = ()) -> list[Codec]:
    """Return the codecs that mode auto chooses from, in the order in which they are tried. First come those without
    `may_raise_loss`, in the order of `CODECS`, exact sums first. Then come the others, the one with the smallest
    measured gap of the loss first, and last those whose gap was not measured.

    Args:
        steps: steps of the run.
        loss_limit: share by which the loss may exceed that of exact sums; infinity: no limit.
        layers: figures of the run's layers, over all ranks, if steps were measured. Then adaptive is among the codecs.
    """
    warmup = warmup_steps(steps)
    codecs = [
        make_codec(settings | ({"warmup_steps": warmup} if "warmup_steps" in codec.model_fields else {}))
        for codec in CODECS
        if codec is not Adaptive  # `adaptive_codec` has it
        for mode in codec.modes()
        for settings in codec.compared_settings(mode)
    ]
    if adaptive := adaptive_codec(layers, warmup):
        codecs.append(adaptive)
    return sorted((codec for codec in codecs if codec.allowed_with(loss_limit)), key=_place)


def _place(codec: Codec) -> float:
    """Return the place of a codec in the order in which codecs are tried; those of one place follow `CODECS`."""
    if not codec.may_raise_loss:
        return -math.inf
    return math.inf if codec.loss_gap is None else codec.loss_gap.share


def warmup_steps(steps: int) -> int:
    """Return how many of a run's steps are warm-up steps of low-rank and sparse codecs in mode auto."""
    return min(math.ceil(WARMUP_SHARE * steps), MAX_WARMUP)


def searched(steps: int, loss_limit: float) -> list[tuple[Codec, float]]:
    """Return (codec, gain) for each codec that gets a search of its own besides exact sums. The plan of this search is
    taken if its mean step is shorter by at least the share `gain` than that of the plan chosen so far.

    These codecs are the one with the fewest bytes among those with the loss of exact sums and, if any others are
    allowed, the one with the fewest bytes among these.

    Args:
        steps: steps of the run.
        loss_limit: share by which the loss may exceed that of exact sums; infinity: no limit.
    """
    candidates = candidate_codecs(steps, loss_limit)
    groups = [[codec for codec in candidates if codec.may_raise_loss == group] for group in (False, True)]
    smallest = [min(group, key=lambda codec: codec.wire_bytes(1.0, 2)) for group in groups if group]
    return [(codec, min_gain(codec.may_raise_loss)) for codec in smallest]


def searched_node_sums(compression: AutoCompression) -> IntraNode:
    """Return how the replicas of a node sum gradients in a search with a codec other than exact sums: as the run file
    says, or with auto exactly. A node that sums first sends fewer bytes, so this helps wherever links between nodes are
    what a step waits for."""
    return "none" if compression.node_sums == "auto" else compression.node_sums


def min_gain(may_raise_loss: bool) -> float:
    """Return the least share of a step that a codec must save to be chosen.

    Args:
        may_raise_loss: whether the loss may be higher with the codec.
    """
    return MIN_LOSSY_GAIN if may_raise_loss else MIN_GAIN


def compression_may_gain(prediction: Prediction) -> bool:
    """Return whether messages and waiting take so large a share of a step that fewer gradient bytes could pay off."""
    terms = prediction.terms
    waits = ("data_parallel", "pipeline_send", "pipeline_bubble", "tensor_parallel")
    return sum(terms[name] for name in waits) >= MIN_LOSSY_GAIN * terms["total"]


def choose_codec(
    cost: CostModel, layout: Layout, steps: int, loss_limit: float, layers: Sequence[LayerFigures] = (),
    node_sums: IntraNode | Literal["auto"] = "auto",
) -> CodecDecision:  # fmt: skip
    """Return the codec for a layout, and the predicted step with this codec.

    Codecs are tried in the order of `candidate_codecs`, exact sums first. A codec is chosen if it shortens the run's
    mean step by the share `MIN_GAIN`, or `MIN_LOSSY_GAIN` if the loss may be higher with it, against the codec chosen
    so far. So of two codecs that are about equally fast, the one with the smaller measured gap is chosen. Codecs by
    layer group come last, with `MIN_GAIN` against a codec with which the loss may be higher, too. So by the cost model
    the mean step is never longer than with exact sums.

    Args:
        cost: cost model with the layout's memory options; its codec does not matter.
        steps: steps of the run.
        loss_limit: share by which the loss may exceed that of exact sums; infinity: no limit.
        layers: figures of the run's layers, over all ranks, if steps were measured. Then mode adaptive is tried, too,
            a sparse codec with which too little of the gradients would arrive is not chosen, and the shares of energy
            of layer groups are measured ones.
        node_sums: how the replicas of a node sum gradients first; auto: with each codec in the best way.
    """
    if layout.dp == 1:
        exact = predict(cost.with_work(codec=NoCompression()), layout, whole=True)
        spec = CodecSpec(reason="there is one replica, so no gradients are summed")
        return CodecDecision(spec, exact, exact.total)
    codecs = candidate_codecs(steps, loss_limit, layers)
    shares = group_shares(cost.work, layers)
    if mixed := fastest_mixed(cost, layout, candidate_codecs(steps, math.inf), loss_limit, shares):
        codecs.append(mixed.codec)
    tried, verdicts, chosen = _try_in_turn(cost, layout, steps, codecs, layers, node_sums)
    compared = [_figures(codec, layout, tried.get(number), verdicts[number]) for number, codec in enumerate(codecs)]
    winner = tried[chosen]
    reason, reasons = _reason(winner, tried[0]), None
    if mixed:
        compared[-1] = compared[-1].model_copy(update={"predicted_gap": mixed.predicted_gap})
        if winner.codec is mixed.codec:
            reasons = mixed.reasons
            reason += f"; predicted loss gap {percent(mixed.predicted_gap)}, allowed {percent(loss_limit)}"
    spec = CodecSpec(codec=winner.codec, reason=reason, group_reasons=reasons, compared=compared)
    return CodecDecision(spec, winner.prediction, winner.mean_step_s, winner.intra_node)


def _try_in_turn(
    cost: CostModel, layout: Layout, steps: int, codecs: Sequence[Codec], layers: Sequence[LayerFigures],
    node_sums: IntraNode | Literal["auto"],
) -> tuple[dict[int, _CodecTrial], dict[int, str], int]:  # fmt: skip
    """Return what was predicted with each codec that can be used, a verdict on each codec, both by the number of the
    codec, and the number of the chosen one.

    Args:
        codecs: the codecs in the order in which they are tried, exact sums first.
    """
    verdicts: dict[int, str] = {}
    tried: dict[int, _CodecTrial] = {}
    chosen = 0
    for number, codec in enumerate(codecs):
        if why := _why_not(cost, layout, codec) or why_loses_too_much(codec, layers):
            verdicts[number] = why
            continue
        priced = choose_node_sums(cost.with_work(codec=priced_codec(codec, layers)), layout, node_sums, MIN_GAIN)
        trial = tried[number] = replace(_try(priced, layout, steps, tried.get(0)), codec=codec)
        if number == 0:
            continue
        before = tried[chosen]
        # The budget allows codecs by layer group as it allows one codec with which the loss may be higher.
        alike = isinstance(codec, Mixed) and before.codec.may_raise_loss
        threshold = min_gain(codec.may_raise_loss and not alike)
        gain = 1 - trial.mean_step_s / before.mean_step_s
        if gain >= threshold:
            verdicts[chosen] = f"{codec.short_label} saves {gain:.1%} of a step"
            chosen = number
        elif gain < 0:
            verdicts[number] = f"{-gain:.1%} slower than {before.codec.short_label}"
        else:
            saved = f"saves {gain:.1%} of a step with {before.codec.short_label}"
            verdicts[number] = f"{saved}, taken from {threshold:.0%} on"
    verdicts[chosen] = "chosen"
    return tried, verdicts, chosen


def _try(priced: CostModel, layout: Layout, steps: int, exact: _CodecTrial | None) -> _CodecTrial:
    """Return the prediction of a layout with a codec, averaged over the run's warm-up steps and other steps.

    Args:
        priced: cost model with the codec.
        steps: steps of the run.
        exact: the result with exact sums; None to predict exact sums themselves.
    """
    codec = priced.work.codec
    prediction = predict(priced, layout, whole=True)
    longest, hidden = None, 0.0
    if layout.shards < layout.dp:
        sums = priced.all_reduce_times(layout.placement, layout.model_parts, layout.rank_of_stage, layout.shards)
        longest = max(sums, key=lambda stage: stage.seconds)
        if not prediction.late_sums:
            hidden = overlapped_s(priced, layout, longest.beside_s, sums.index(longest))
    mean_step_s = prediction.total
    if exact is not None and codec.has_state:
        # Warm-up steps are summed exactly, after the backward pass.
        share = min(1.0, getattr(codec, "warmup_steps", 0) / steps)
        mean_step_s = share * (exact.prediction.total + exact.overlapped_s) + (1 - share) * mean_step_s
    return _CodecTrial(codec, priced.work.intra_node, prediction, longest, hidden, mean_step_s)


def _why_not(cost: CostModel, layout: Layout, codec: Codec) -> str | None:
    """Return why a codec cannot be used with this layout; None if it can."""
    if not codec.has_state:
        return None
    if layout.shards == layout.dp and (why := _why_not_sharded(cost.work.precision, codec, layout)):
        return f"zero {layout.memory_options.zero} over all replicas: {why}"
    dim = cost.work.spec.dim
    if why := codec.why_no_matrices(dim, low_rank_width(dim, layout.tp)):
        return why
    excess = layout.memory_shortage(cost.with_work(codec=codec).memory)
    return None if excess is None else str(excess)


def _why_not_sharded(precision: str, codec: Codec, layout: Layout) -> str | None:
    """Return why workers would refuse a codec with state where gradients are sharded over all replicas; None if they
    would not.

    Args:
        precision: the run's precision, such as bf16.
        codec: a codec that keeps state between steps.
    """
    if codec.sharded_sums == "none":
        return WHY_NOT_SHARDED
    if reduces_each_micro_batch(codec, layout.memory_options.zero, max(layout.micro_batches)):
        return WHY_NOT_PER_MICRO_BATCH
    return WHY_NOT_LOSS_SCALED if precision == "fp16" else None


def _figures(codec: Codec, layout: Layout, tried: _CodecTrial | None, verdict: str) -> CodecFigures:
    if tried is None:
        return CodecFigures(codec=codec, verdict=verdict)
    reduction: dict[str, Any] = {}
    if tried.sum is not None:
        reduction = {name: getattr(tried.sum, name) for name in ("sent_bytes", "wire_s", "processor_s")}
    if layout.level_replicas > 1:
        reduction["intra_node"] = tried.intra_node
    return CodecFigures(
        codec=codec, **reduction, hidden_s=tried.overlapped_s, step_s=tried.mean_step_s, verdict=verdict
    )


def _reason(winner: _CodecTrial, exact: _CodecTrial) -> str:
    before = format_seconds(exact.mean_step_s)
    if winner is exact and winner.intra_node != "flat":
        return f"exact sums between nodes, of what each node has summed: a mean step of {before}"
    if winner is exact:
        return f"exact sums, a mean step of {before}: no other way saves enough of it"
    return f"a mean step of {format_seconds(winner.mean_step_s)}, warm-up included; with exact sums {before}"


def choose_messages(cost: CostModel, layout: Layout, lossy: bool) -> tuple[CostModel, Prediction, list[str]]:
    """Choose the codec of each boundary between stages by the thresholds that also decide on gradient codecs.

    Codecs become available one after the other, in the order of `MESSAGES`. Every boundary takes the available codec
    that delivers its messages the soonest. The new choice for all boundaries replaces the old one if it shortens the
    step by `MIN_GAIN`, or by `MIN_LOSSY_GAIN` if the new codec is lossy.

    Args:
        cost: cost model with the layout's memory options and gradient codec; its message codecs do not matter.
        lossy: whether the codec int8, which counts as lossy for messages, is allowed.

    Returns:
        The cost model with the chosen codecs, the predicted step, and a list with a sentence that gives the reason; the
        list is empty if no message leaves a node.
    """
    full: Messages = "none"
    stages = range(len(layout.blocks))

    def predicted(messages: tuple[Messages, ...]) -> tuple[CostModel, Prediction]:
        encoded = cost.with_work(messages=messages)
        return encoded, predict(encoded, layout, whole=True)

    exact = chosen = predicted((full,) * len(stages))
    replicas = cost.placement_links(layout.placement).representatives
    if not any(crosses_nodes(a, b) for replica in replicas for a, b in _hops(layout, replica)):
        return *exact, []
    allowed = [full]
    for encoding, properties in MESSAGES.items():
        if encoding == full or (properties.lossy and not lossy):
            continue
        allowed.append(encoding)
        other = predicted(tuple(_soonest(cost, layout, stage, allowed) for stage in stages))
        if 1 - other[1].total / chosen[1].total >= min_gain(properties.lossy):
            chosen = other
    if chosen is exact:
        return *exact, [f"Messages between stages travel in fp32: in {' or '.join(allowed[1:])} too little is won."]
    names = " and ".join(dict.fromkeys(encoding for encoding in chosen[0].work.messages if encoding != full))
    reason = (
        f"Messages between stages on different nodes travel in {names}: a step of "
        f"{format_seconds(chosen[1].total)}, in fp32 {format_seconds(exact[1].total)}."
    )
    return *chosen, [reason]


def _soonest(cost: CostModel, layout: Layout, stage: int, allowed: Sequence[Messages]) -> Messages:
    """Return the codec with which the messages between a stage and the next arrive the soonest, in the slowest
    replica.
    """
    if stage == len(layout.blocks) - 1:
        return "none"
    a, b = layout.rank_of_stage[stage : stage + 2]
    size = layout.micro_batch
    replicas = cost.placement_links(layout.placement).representatives
    crossing = [replica for replica in replicas if crosses_nodes(*_hops(layout, replica)[stage])]

    def seconds(encoding: Messages) -> float:
        return max(
            cost.stage_message_s(layout.placement, replica, a, b, size, encoding)
            + cost.stage_message_s(layout.placement, replica, b, a, size, encoding)
            + 2 * sum(cost.message_cast_s(layout.placement[replica][rank], size, encoding) for rank in (a, b))
            for replica in crossing
        )

    return min(allowed, key=seconds) if crossing else "none"


def _hops(layout: Layout, replica: int) -> list[tuple[TensorParallelGroup, TensorParallelGroup]]:
    """Return [stage] -> (its tensor-parallel group, the group of the next stage), for one replica and all stages but
    the last.
    """
    return list(pairwise(layout.unit(replica, stage) for stage in range(len(layout.blocks))))
