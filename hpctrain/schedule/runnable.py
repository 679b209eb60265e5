"""Checks that a plan can be executed for a run: refuses combinations that torch or hpctrain's workers cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpctrain.base.errors import InputError
from hpctrain.records.plan.compression import MODES
from hpctrain.records.plan.gradient_codec import GradientCodec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Action
from hpctrain.records.run.run import Run
from hpctrain.schedule.resolve import schedule_of

WHY_NOT_COMPILED_TP = "torch cannot compile the backward of matrices that are split over devices"
WHY_NOT_COMPILED_HALVES = "a compiled block cannot do one half of its backward (I, W)"
WHY_NOT_SHARED_HALVES = (
    "an encoder_decoder uses the same weights in several places of a stage, and torch cannot do the backward for such "
    "weights alone (W)"
)
WHY_NOT_SHARDED = "its messages bring sums to all ranks, where each is to get those of its own part"
WHY_NOT_PER_MICRO_BATCH = "a choice of the gradient would be sent for each micro-batch instead of each step"
WHY_NOT_LOSS_SCALED = "a part of the gradient is sent before it is known whether another one overflows"
WHY_NOT_BY_LEVEL = "it sums no gradients, neither within nodes nor between them"
WHY_NOT_SELECTED_BY_LEVEL = "it selects numbers of whole parameters, of which a rank of a node has only a part then"
WHY_NOT_TIED = "their copies would meet apart, with sums that differ in their last bits"
WHY_NOT_RECOMPUTED_HALVES = (
    "with backwards in two halves (I, W) torch would compute a block again for each of its matrices"
)


def check_runnable(plan: Plan, run: Run) -> None:
    """Check that a plan can be executed for a run.

    Raises:
        InputError: the table of a custom schedule is incomplete, or the plan cannot be executed; the message gives the
            first reason. Also if a check needs the model's dimensions and run.yaml does not have them yet (`Run.spec`).
    """
    if plan.sequence_parallel and run.data.seq_len % plan.tp:
        raise InputError(
            f"data.seq_len: found {run.data.seq_len}; with sequence_parallel it must be a multiple of tp {plan.tp}; "
            "change it, or switch sequence_parallel off"
        )
    if plan.sequence_parallel and run.model.import_ is not None:
        raise InputError(
            "sequence_parallel: found true with model.import; which modules of your own model are norms is not known; "
            "switch sequence_parallel off"
        )
    if plan.sequence_parallel and not run.spec().supports_sequence_parallel:
        raise InputError(
            "sequence_parallel: found true with an encoder_decoder; its two streams travel as one along the sequence; "
            "switch sequence_parallel off"
        )
    if run.compile and plan.tp > 1:
        raise InputError(
            f"compile: found true with tp {plan.tp}; {WHY_NOT_COMPILED_TP}; switch compile off, or use tp 1"
        )
    _check_compression(plan, run)
    for action in _half_backwards(plan):
        if run.model.import_ is None and not run.spec().can_split_backward:
            raise InputError(
                f"actions: found {action}; {WHY_NOT_SHARED_HALVES}; use schedule 1f1b, gpipe or interleaved_1f1b"
            )
        if run.compile:
            raise InputError(
                f"compile: found true with the action {action}; {WHY_NOT_COMPILED_HALVES}; switch compile off, or use "
                "schedule 1f1b"
            )
        recompute = plan.stages[action.stage].recompute
        if recompute != "none":
            raise InputError(
                f"stages[{action.stage}].recompute: found {recompute} with the action {action}; "
                f"{WHY_NOT_RECOMPUTED_HALVES}; use recompute none, or schedule 1f1b"
            )


def _check_compression(plan: Plan, run: Run) -> None:
    if plan.shards > 1 and not plan.codec_reduces_replicate_axis:
        _check_sharded(plan, run)
    if not plan.codec.sums_gradients and len(plan.compression) > 1 and not plan.codec_reduces_replicate_axis:
        raise InputError(
            f"compression.intra_node: found {plan.intra_node} with mode {plan.codec.mode}; "
            f"{WHY_NOT_BY_LEVEL}; use intra_node flat, or parallel.shard node"
        )
    if not plan.codec.sums_gradients and plan.pp > 1 and plan.dp > 2 and _tied(plan, run):
        raise InputError(
            f"compression.mode: found {plan.codec.mode} with pp {plan.pp} and weights in several stages (a tied "
            f"embedding, an encoder_decoder's relative positions); {WHY_NOT_TIED}; use another mode, or parallel.pp 1"
        )


def _check_sharded(plan: Plan, run: Run) -> None:
    """Check that the codec works with ZeRO over all replicas, which sums gradients within the backward pass.

    Raises:
        InputError: the codec does not work with it; the message gives the reason and what to use instead.
    """
    codec = plan.codec
    refused = f"compression.mode: found {codec.mode} with zero {plan.zero} over all replicas"
    if codec.sharded_sums == "none":
        usable = _modes(lambda other: other.sharded_sums != "none")
        raise InputError(f"{refused}; {WHY_NOT_SHARDED}; use {usable}, parallel.zero 0, or parallel.shard node")
    if len(plan.compression) > 1 and codec.sharded_sums != "all":
        usable = _modes(lambda other: other.sharded_sums == "all")
        raise InputError(
            f"{refused} and intra_node {plan.intra_node}; {WHY_NOT_SELECTED_BY_LEVEL}; use {usable}, "
            "intra_node flat, or parallel.shard node"
        )
    most = max(replica.micro_batches for replica in plan.replicas)
    if reduces_each_micro_batch(codec, plan.zero, most):
        raise InputError(
            f"{refused} and {most} micro-batches; {WHY_NOT_PER_MICRO_BATCH}; use parallel.zero 1, one micro-batch, "
            f"{_modes(lambda other: other.sharded_sums == 'all')}, or parallel.shard node"
        )
    if run.precision == "fp16" and codec.has_state:
        usable = _modes(lambda other: other.sharded_sums == "all" and not other.has_state)
        raise InputError(
            f"{refused} and precision fp16; {WHY_NOT_LOSS_SCALED}; use precision bf16, or compression {usable}"
        )


def reduces_each_micro_batch(codec: GradientCodec, zero: int, micro_batches: int) -> bool:
    """Return whether a codec would have to select numbers in every micro-batch, because ZeRO sums gradients in each.

    A plan with such a codec is refused, because the selected numbers would be sent for each micro-batch instead of once
    a step.

    Args:
        codec: codec of gradients that are sharded over all replicas.
        zero: ZeRO level.
        micro_batches: the largest number of micro-batches of any replica.
    """
    return codec.sharded_sums != "all" and zero > 1 and micro_batches > 1


def _modes(allows: Callable[[type[GradientCodec]], bool]) -> str:
    """Return the modes of `compression` whose codec class passes `allows`, as text: 'none, bf16 or int8'."""
    *others, last = (mode for mode, codec in MODES.items() if allows(codec))
    return f"{', '.join(others)} or {last}"


def _tied(plan: Plan, run: Run) -> bool:
    spec = run.model.measured if run.model.import_ is not None else run.spec()
    return spec is not None and bool(spec.shared_weights([stage.layers for stage in plan.stages]))


def _half_backwards(plan: Plan) -> Iterator[Action]:
    """Yield one split backward action (I or W) for each stage that has any in the action table of any replica."""
    seen = set()
    for replica in range(plan.dp):
        for row in schedule_of(plan, replica)[0].ranks:
            for action in row:
                if action.kind in "IW" and action.stage not in seen:
                    seen.add(action.stage)
                    yield action
