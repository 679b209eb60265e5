"""Memory options of a plan: ZeRO, recomputation and sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.base.errors import InputError
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.records.plan.levels import consecutive_per_node
from hpctrain.records.plan.plan import Plan, Recompute, ZeroLevel
from hpctrain.records.run.run import FixedParallel, Run
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES
from hpctrain.schedule.runnable import WHY_NOT_COMPILED_HALVES, WHY_NOT_RECOMPUTED_HALVES, WHY_NOT_SHARED_HALVES


@dataclass(frozen=True)
class MemoryOptions:
    """What a plan does to save memory, if it does the same in all stages. An edited plan whose stages differ in
    `recompute` has no such options.

    `shard` says over which replicas ZeRO shards: over all, or over those within a node.
    """

    zero: ZeroLevel = 0
    shard: Literal["all", "node"] = "all"
    sequence_parallel: bool = False
    recompute: Recompute = "none"

    @property
    def equal_micro_batches(self) -> bool:
        """Whether all replicas need the same number of micro-batches, because gradients are summed after each
        micro-batch.
        """
        return self.zero >= 2

    def __str__(self) -> str:
        """Return the options as text for messages, such as 'zero 1, recompute full'; 'nothing' for the default."""
        parts = [f"zero {self.zero}"] if self.zero else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts) or "nothing"


DEFAULT_MEMORY_OPTIONS = MemoryOptions()
"""The default: no sharding and no recomputation."""


def memory_options_of_run(run: Run) -> tuple[MemoryOptions, list[str]]:
    """Return the memory options of the run file, and notes on keys of the run file that do not apply.

    Raises:
        InputError: two keys cannot be combined.
    """
    if not isinstance(run.parallel, FixedParallel):
        return DEFAULT_MEMORY_OPTIONS, []
    given = run.parallel
    _check_sequence_parallel(given, run.data.seq_len)
    _check_split_backward(given, run)
    memory_options = MemoryOptions(given.zero, given.shard, given.sequence_parallel, given.recompute)
    if memory_options.zero == 0 and memory_options.shard == "node":
        raise InputError("parallel.shard: found 'node' with zero 0, which shards nothing; set parallel.zero to 1 to 3")
    if memory_options.zero and given.dp == 1:
        note = f"parallel.zero {memory_options.zero} does not apply: with dp 1 there are no replicas to shard over."
        return replace(memory_options, zero=0, shard="all"), [note]
    return memory_options, []


def memory_options_of_plan(plan: Plan) -> MemoryOptions:
    """Return the memory options of a plan. All its stages must have the same recomputation, because that of the first
    one is returned.
    """
    return MemoryOptions(
        zero=plan.zero,
        shard="all" if plan.shard is None else "node",
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.stages[0].recompute,
    )


def shard_group_size(placement: Placement, memory_options: MemoryOptions) -> int:
    """Return the number of consecutive replicas over which one copy of the state is sharded.

    The number is 1 without sharding. It is also 1 if the options ask for sharding within nodes and the nodes do not all
    hold equally many replicas of each stage.
    """
    if memory_options.zero == 0:
        return 1
    if memory_options.shard == "all":
        return len(placement)
    # In the column of each pipeline rank, every group of consecutive replicas has to lie within a node.
    return consecutive_per_node(
        [frozenset(device.node for device in unit.devices) for unit in column]
        for column in zip(*placement, strict=True)
    )


def _check_sequence_parallel(given: FixedParallel, seq_len: int) -> None:
    if not given.sequence_parallel:
        return
    if given.tp == 1:
        raise InputError("parallel.sequence_parallel: found true with tp 1; it needs tp 2 or more")
    if seq_len % given.tp:
        raise InputError(
            f"parallel.sequence_parallel: found true, but data.seq_len {seq_len} is not a multiple of tp {given.tp}; "
            "change one of them"
        )


def _check_split_backward(given: FixedParallel, run: Run) -> None:
    """Check that no setting of the run prevents torch from splitting the backward into I and W.

    With recomputation, torch would compute a block again once for each of its weights: with torch 2.13, the backward
    for weights of a recomputed block took longer by the time of eight forwards of the block.

    Raises:
        InputError: recomputation, compilation or a model that cannot split its backward.
    """
    if given.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    if given.recompute != "none":
        raise InputError(
            f"parallel.recompute: found {given.recompute!r} with schedule {given.schedule}; "
            f"{WHY_NOT_RECOMPUTED_HALVES}; use schedule 1f1b, gpipe or interleaved_1f1b, or recompute none"
        )
    if run.model.import_ is None and not run.spec().can_split_backward:
        raise InputError(
            f"parallel.schedule: found {given.schedule}; {WHY_NOT_SHARED_HALVES}; use 1f1b, gpipe or interleaved_1f1b"
        )
    if run.compile:
        raise InputError(
            f"compile: found true with parallel.schedule {given.schedule}; {WHY_NOT_COMPILED_HALVES}; "
            "use schedule 1f1b, gpipe or interleaved_1f1b"
        )
