"""The space of a search: the options that one pool of devices has for one workload, their placements and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hpctrain.base.collector import cached_method
from hpctrain.planner.bounds.closed_form import ClosedFormBound
from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.bounds.memory_feasibility import MemoryFeasibility
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.memory_options import shard_group_size
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import FEWEST_ACTIVATIONS, ScheduleSpec, Workload
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    TensorParallelGroup,
    interchangeable_classes,
    make_tensor_parallel_groups,
)
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.layout.partition import fit_layout, has_room, why_no_layout
from hpctrain.planner.layout.placement import placements, placements_of_mixtures
from hpctrain.planner.limits import DEFAULT_LIMITS, SearchLimits
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.runnable import WHY_NOT_COMPILED_TP


class WarmStart(NamedTuple):
    """A plan near the previous plan, made before a search, which the search has to beat."""

    space: SearchSpace
    """The space with the memory options of `best`."""
    best: Prediction
    """The plan that the search has to beat."""
    reused_layouts: tuple[Layout, ...]
    """Layouts on the surviving devices that move little state, the one with the fewest moves first."""


@dataclass(eq=False)
class SearchSpace:
    """The options of one pool of devices for one workload, with their bounds; caches its results."""

    pool: DevicePool
    cost: CostModel
    limits: SearchLimits = DEFAULT_LIMITS
    impossible: dict[ParallelDims, str] = field(default_factory=dict)
    """Degrees that cannot run at all -> the reason."""
    warm_start: WarmStart | None = None
    """The plan to beat if the new plan replaces another one; None if it replaces none, or if none fits."""
    replaces: bool = False
    """Whether the new plan replaces another one. On many devices the search is then shorter, because a run waits."""

    @property
    def work(self) -> Workload:
        return self.cost.work

    @cached_property
    def pool_placements(self) -> PoolPlacements:
        return PoolPlacements(self.pool, self.cost, self.limits.max_compared_units)

    @cached_property
    def bounds(self) -> OptionBounds:
        return OptionBounds(self.cost, self.pool_placements, self.limits)

    def with_work(self, **changes: Any) -> SearchSpace:
        """Return the space of this pool with some fields of its workload changed.

        Args:
            changes: fields of `Workload` with their new values.
        """
        other = SearchSpace(self.pool, self.cost.with_work(**changes), self.limits)
        other.pool_placements = self.pool_placements
        return other

    @cached_property
    def candidate_dims(self) -> list[ParallelDims]:
        """The degrees to try. Degrees that cannot run are put into `impossible` instead."""
        given = self.work.fixed
        if given is None:
            dims = enumerate_dims(len(self.pool.devices), self.work.spec, self.work.sequences)
        else:
            dims = [ParallelDims(given.pp, given.dp, given.tp)]
        reasons = {candidate: self._why_impossible(candidate) for candidate in dims}
        self.impossible.update((candidate, reason) for candidate, reason in reasons.items() if reason)
        return [candidate for candidate in dims if not reasons[candidate]]

    def options(self, candidate_dims: Sequence[ParallelDims], sizes: Sequence[int] | None = None) -> Iterator[Option]:
        """Yield all options with these degrees and micro-batch sizes that have a micro-batch for each replica.

        Args:
            sizes: micro-batch sizes in sequences; None: the size that the run file fixes, else all that divide the
                global batch.
        """
        for dims in candidate_dims:
            for size in self.work.micro_batch_sizes() if sizes is None else sizes:
                if self.work.sequences // size >= dims[1]:
                    for schedule_spec in self.work.schedule_specs(dims[0]):
                        yield Option(dims, schedule_spec, size)

    def units(self, tp: int) -> list[TensorParallelGroup]:
        """Return the tensor-parallel groups of `tp` devices into which the pool is divided."""
        return self.pool_placements.units(tp)

    def placements(self, dims: ParallelDims) -> list[Placement]:
        """Return the placements of these degrees that a search tries, without those whose replicas cannot shard state
        as the memory options ask.
        """
        return self.pool_placements.shardable(self.work, dims)

    def can_shard(self, placement: Placement) -> bool:
        """Return whether the placement has replicas that can shard state as the memory options ask; True if they ask
        for no sharding.
        """
        return can_shard(self.work, placement)

    def why_no_layout(self, option: Option) -> str | None:
        """Return why the option has no layout, whatever the devices' memory; None if it has one."""
        return why_no_layout(self.cost, option)

    def fit_layout(self, placement: Placement, option: Option) -> Layout:
        """Return the option's layout on this placement, with blocks and micro-batches distributed by speed."""
        return fit_layout(self.cost, placement, option.schedule_spec, option.micro_batch)

    def has_room(self, placement: Placement, option: Option) -> bool:
        """Return whether the pipeline ranks of a placement together have memory for all blocks, with equally many
        micro-batches in all replicas."""
        return has_room(self.cost, placement, option.schedule_spec, option.micro_batch)

    def allows(self, dims: ParallelDims) -> bool:
        """Return whether degrees can run: none is below 1, the run file and the model allow them, and there are enough
        devices."""
        fixed = self.work.fixed
        if min(dims) < 1 or (fixed is not None and dims != (fixed.pp, fixed.dp, fixed.tp)):
            return False
        return not self._why_impossible(dims)

    def most_replicas(self, pp: int, tp: int) -> int:
        """Return the largest number of replicas with these degrees for which there are devices and sequences."""
        return min(len(self.units(tp)) // pp, self.work.sequences)

    def _why_impossible(self, dims: ParallelDims) -> str | None:
        pp, dp, tp = dims
        work, units = self.work, len(self.units(tp))
        if reason := work.spec.tensor_parallel_error(tp) or work.spec.pipeline_error(pp):
            return reason
        if work.compiled and tp > 1:
            return f"compile is true, and {WHY_NOT_COMPILED_TP}"
        if pp > work.spec.layers:
            return f"the model has {work.spec.layers} blocks, fewer than pp {pp}"
        if work.memory_options.zero and dp == 1:
            return f"zero {work.memory_options.zero} shards over replicas, dp 1 is one"
        if dp > work.sequences:
            return f"batch.global {work.sequences} is less than one sequence for each of dp {dp} replicas"
        if pp * dp > units and tp == 1:
            return f"{pp * dp} devices are needed, {units} are usable"
        if pp * dp > units:
            return f"pp × dp = {pp * dp} groups of {tp} equal devices are needed, there are {units}"
        return None


class OptionBounds:
    """Lower bounds and memory checks of the options of a space; caches its results."""

    def __init__(self, cost: CostModel, pool_placements: PoolPlacements, limits: SearchLimits) -> None:
        self.cost, self.pool_placements, self.limits = cost, pool_placements, limits
        self._counts = pool_placements.counts
        self._memory = MemoryFeasibility(cost)

    @cached_method
    def knapsack(self, option: Option) -> KnapsackBound:
        """Return the option's knapsack bound."""
        return self._knapsack(option)

    @cached_method
    def _closed_form(self, tp: int, micro_batch: int) -> ClosedFormBound:
        return ClosedFormBound(self.cost, self._counts(tp), micro_batch)

    def work_s(self, dims: ParallelDims, micro_batch: int) -> float:
        """Return a lower bound of the step time: the least seconds that computation alone takes with any schedule.

        The bound is weaker than `step_s` and quick to compute; a search sorts degrees by it.
        """
        return self._closed_form(dims[2], micro_batch).work_s(dims)

    @cached_method
    def step_s(self, option: Option) -> float:
        """Return a lower bound in seconds of the step time of all layouts of the option: the closed-form bound."""
        return self._closed_form(option.dims.tp, option.micro_batch).step_s(option)

    def placements_by(self, knapsack_bound: KnapsackBound, limit_s: float) -> list[Placement]:
        """Return up to two placements that may finish within `limit_s` seconds. For each pipeline rank, the knapsack
        bound finds how many tensor-parallel groups of each class (`UnitClass`) may take the rank within this limit; the
        placements have these groups. A placement that cannot shard state as the memory options ask is left out. The
        list is empty if the bound excludes all placements.
        """
        mixtures = knapsack_bound.mixtures_by(limit_s)
        if mixtures is None:
            return []
        units = self.pool_placements.units(knapsack_bound.tp)
        classes = [[unit for unit in units if self.cost.kind(unit) in c.kinds] for c in knapsack_bound.classes]
        made = placements_of_mixtures(classes, mixtures)
        return [placement for placement in made if can_shard(self.cost.work, placement)]

    def can_hold(self, option: Option, shards: int) -> bool:
        """Return whether the devices have memory for the model with this option if `shards` replicas share a state."""
        return self._memory.can_hold(self._counts(option.dims.tp), option, shards)

    def may_fit(self, option: Option) -> bool:
        """Return False if no placement of the option has memory for the model."""
        return self.can_hold(option, self._most_shards(option.dims))

    def is_too_large(self, option: Option) -> bool:
        """Return whether `may_fit` is known to be False from earlier calls. Nothing is computed."""
        return self._memory.is_too_large(option, self._most_shards(option.dims))

    def any_may_fit(self, dims: ParallelDims, micro_batch: int) -> bool:
        """Return False if it is certain that the devices lack memory for the model under every schedule that is not
        V-shaped. V-shaped schedules are not judged.

        The schedule with the fewest live activations (`FEWEST_ACTIVATIONS`) stands for all others. V-shaped schedules
        need less in some stages, because their first and last stage share a rank.
        """
        memory_options = self.cost.work.memory_options
        if memory_options.zero or memory_options.recompute != "none":
            return True  # with several stages a rank, less is gathered or recomputed at a time
        return self.may_fit(Option(dims, FEWEST_ACTIVATIONS, micro_batch))

    def any_feasible_within(self, dims: ParallelDims, micro_batch: int, limit_s: float) -> bool:
        """Return False if no schedule except a V-shaped one could finish within `limit_s` seconds, even with unlimited
        memory.
        """
        return self._knapsack(Option(dims, ScheduleSpec("1f1b"), micro_batch), waits=False).feasible_within(limit_s)

    def _knapsack(self, option: Option, waits: bool = True) -> KnapsackBound:
        counts, shards = self._counts(option.dims.tp), self._most_shards(option.dims)
        return KnapsackBound(self.cost, counts, option, shards, waits, self.limits)

    def _most_shards(self, dims: ParallelDims) -> int:
        """Return the largest number of replicas over which a state is sharded in any placement of these degrees; 1
        without ZeRO."""
        memory_options = self.cost.work.memory_options
        if memory_options.zero and memory_options.shard == "node":
            placements = self.pool_placements.shardable(self.cost.work, dims)
            return max((shard_group_size(placement, memory_options) for placement in placements), default=1)
        return dims[1] if memory_options.zero else 1


class PoolPlacements:
    """Tensor-parallel groups and placements of one pool, cached, because they do not depend on memory options or
    codecs.

    Args:
        max_compared_units: largest number of groups whose links are compared pair by pair.
    """

    def __init__(self, pool: DevicePool, cost: CostModel, max_compared_units: int) -> None:
        self.pool, self.cost, self.max_compared_units = pool, cost, max_compared_units
        self.complete = True
        """False if some orders of devices were left out."""

    @cached_method
    def units(self, tp: int) -> list[TensorParallelGroup]:
        """Return the tensor-parallel groups of `tp` devices into which the pool is divided."""
        return make_tensor_parallel_groups(self.pool, tp)

    @cached_method
    def counts(self, tp: int) -> UnitCounts:
        """Return the tensor-parallel groups of `tp` devices, counted by kind."""
        return UnitCounts(self.cost, self.units(tp))

    def shardable(self, work: Workload, dims: ParallelDims) -> list[Placement]:
        """Return the placements of these degrees that a search tries, without those whose replicas cannot shard state
        as the workload's memory options ask.
        """
        return [placement for placement in self.placements(dims) if can_shard(work, placement)]

    @cached_method
    def placements(self, dims: ParallelDims) -> list[Placement]:
        """Return the placements of these degrees that a search tries."""
        units, classes = self.units(dims.tp), self._interchangeable_classes(dims.tp)
        likely, complete = placements(units, classes, dims.pp, dims.dp, lambda a, b: self.cost.send_s(a, b, 1))
        self.complete = self.complete and complete
        return likely

    @cached_method
    def _interchangeable_classes(self, tp: int) -> list[int]:
        """Return the class of each tensor-parallel group of `tp` devices; each has its own if there are too many."""
        units = self.units(tp)
        if len(units) > self.max_compared_units:
            return list(range(len(units)))
        return interchangeable_classes(units, self.pool.links, self.cost.work.stage_boundary_bytes(1))


def can_shard(work: Workload, placement: Placement) -> bool:
    """Return what `SearchSpace.can_shard` does for a space of this workload."""
    if work.memory_options.zero == 0:
        return True
    shards = shard_group_size(placement, work.memory_options)
    # With degrees given by hand, `check_runnable` refuses a codec that cannot be sharded, and says why.
    return shards > 1 and (shards < len(placement) or work.fixed is not None or work.may_shard_gradients)


EXHAUSTIVE_DEVICES = 64
"""Largest number of devices for which a search begins with all numbers of replicas."""
FEW_DEVICES = 8
"""Largest number of devices for which impossible degrees are listed too, so that the plan can give the reasons."""


def enumerate_dims(devices: int, spec: Spec, sequences: int) -> list[ParallelDims]:
    """Return the (pp, dp, tp) to try, with a product of at most `devices`.

    On more than `EXHAUSTIVE_DEVICES` devices, dp is the largest number of replicas, its half, its quarter and so on, or
    the largest number of replicas that divides the batch evenly.

    Args:
        sequences: sequences of the global batch.
    """
    if devices <= FEW_DEVICES:
        whole = range(1, devices + 1)
        return [ParallelDims(pp, dp, tp) for pp in whole for dp in whole for tp in whole if pp * dp * tp <= devices]
    dims = []
    splits = [tp for tp in range(1, devices + 1) if spec.tensor_parallel_error(tp) is None]
    for pp in range(1, min(devices, spec.layers) + 1):
        for tp in splits:
            most = min(devices // (pp * tp), sequences)
            if devices <= EXHAUSTIVE_DEVICES:
                dims += [ParallelDims(pp, dp, tp) for dp in range(1, most + 1)]
            elif most:
                even = next(dp for dp in range(most, 0, -1) if sequences % dp == 0)
                halves = (most >> power for power in range(most.bit_length()))
                dims += [ParallelDims(pp, dp, tp) for dp in dict.fromkeys((even, *halves))]
    return dims
