"""The space of a search: the options that one pool of devices has for one workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.bounds.option import Option
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.degrees import enumerate_dims
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.layout.partition import fit_layout, why_no_layout
from hpctrain.planner.limits import DEFAULT_LIMITS, SearchLimits
from hpctrain.planner.search.option_bounds import OptionBounds, can_shard
from hpctrain.planner.search.pool_placements import PoolPlacements
from hpctrain.planner.simulate.predict import Prediction
from hpctrain.records.plan.compression import Codec
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.schedule.runnable import WHY_NOT_COMPILED_TP


class WarmStart(NamedTuple):
    """A known plan which a search has to beat."""

    space: SearchSpace
    """The space with the plan's memory options."""
    best: Prediction
    reused_layouts: tuple[Layout, ...]
    """Layouts similar to the previous plan that move little state, the one with the fewest moves first."""


@dataclass(eq=False)
class SearchSpace:
    """The options of one pool of devices for one workload, with their bounds; caches its results."""

    pool: DevicePool
    cost: CostModel
    limits: SearchLimits = DEFAULT_LIMITS
    impossible: dict[ParallelDims, str] = field(default_factory=dict)
    """Degrees that cannot run at all, with the reason."""
    warm_start: WarmStart | None = None
    """The plan to beat when the new plan replaces another."""

    @property
    def work(self) -> Workload:
        return self.cost.work

    @cached_property
    def pool_placements(self) -> PoolPlacements:
        return PoolPlacements(self.pool, self.cost, self.limits.max_compared_units)

    @cached_property
    def bounds(self) -> OptionBounds:
        return OptionBounds(self.cost, self.pool_placements, self.limits)

    def with_memory_options(self, memory_options: MemoryOptions) -> SearchSpace:
        """Return the space with other memory options for this pool."""
        return self._with(replace(self.work, memory_options=memory_options))

    def with_codec(self, codec: Codec) -> SearchSpace:
        """Return the space with another gradient codec for this pool."""
        return self._with(replace(self.work, codec=codec))

    def _with(self, work: Workload) -> SearchSpace:
        other = SearchSpace(self.pool, self.cost.with_work(work), self.limits)
        other.pool_placements = self.pool_placements
        return other

    @cached_property
    def candidate_dims(self) -> list[ParallelDims]:
        """Return the degrees to try; put those that cannot run into `impossible`."""
        given = self.work.fixed
        if given is None:
            dims = enumerate_dims(len(self.pool.devices), self.work.spec, self.work.sequences)
        else:
            dims = [ParallelDims(given.pp, given.dp, given.tp)]
        reasons = {candidate: self._why_impossible(candidate) for candidate in dims}
        self.impossible.update((candidate, reason) for candidate, reason in reasons.items() if reason)
        return [candidate for candidate in dims if not reasons[candidate]]

    def options(self, candidate_dims: Sequence[ParallelDims], sizes: Sequence[int] | None = None) -> Iterator[Option]:
        """All options with these degrees and micro-batch sizes; by default the sizes that divide the batch."""
        for dims in candidate_dims:
            for size in self.work.micro_batch_sizes() if sizes is None else sizes:
                if self.work.sequences // size >= dims[1]:
                    for schedule_spec in self.work.schedule_specs(dims[0]):
                        yield Option(dims, schedule_spec, size)

    def units(self, tp: int) -> list[TensorParallelGroup]:
        """The tensor-parallel groups of size `tp`."""
        return self.pool_placements.units(tp)

    def placements(self, dims: ParallelDims) -> list[Placement]:
        """The likely placements of these degrees, without those that cannot be sharded as asked."""
        return [placement for placement in self.pool_placements.placements(dims) if self.can_shard(placement)]

    def can_shard(self, placement: Placement) -> bool:
        """Whether the placement has replicas to shard over; also True if no sharding is asked for."""
        return can_shard(self.work, placement)

    def why_no_layout(self, option: Option) -> str | None:
        """Return why the option has no layout, apart from memory; None if it has one."""
        return why_no_layout(self.cost, option.dims.pp, option.dims.dp, option.schedule_spec, option.micro_batch)

    def fit_layout(self, placement: Placement, option: Option) -> Layout:
        """Return the option's layout on this placement, with blocks and micro-batches distributed by speed."""
        return fit_layout(self.cost, placement, option.schedule_spec, option.micro_batch)

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
