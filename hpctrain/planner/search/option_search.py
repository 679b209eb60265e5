"""Evaluation of options with given memory options: which are possible, their bounds, and their best layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.bounds.closed_form import ClosedFormBound
from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.bounds.memory_feasibility import MemoryFeasibility
from hpctrain.planner.bounds.unit_counts import UnitCounts
from hpctrain.planner.cost.memory_options import MemoryOptions, shard_group_size
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import FEWEST_ACTIVATIONS, ScheduleSpec, Workload
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    TensorParallelGroup,
    interchangeable_classes,
    make_tensor_parallel_groups,
)
from hpctrain.planner.layout.column_placement import placements_of_mixtures
from hpctrain.planner.layout.degrees import enumerate_dims
from hpctrain.planner.layout.layout import Layout, MemoryShortage
from hpctrain.planner.layout.partition import fit_layout, why_no_layout
from hpctrain.planner.layout.placement import placements
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict
from hpctrain.records.plan.compression import Codec
from hpctrain.records.plan.parallel_dims import ParallelDims
from hpctrain.schedule.runnable import WHY_NOT_COMPILED_TP

MAX_COMPARED_UNITS = 64
"""Up to this many tensor-parallel groups, links are compared pair by pair."""
WHY_NO_SHARDING = (
    "shard node needs as many replicas of every stage in each node, two or more, and no placement has that; "
    "use shard all, or other degrees"
)


class Evaluation(NamedTuple):
    """The result for given degrees, schedule and micro-batch size."""

    best: Prediction | None
    nearest: Layout | None
    """The layout that fits with the smallest bound; None where none fits."""
    bound_s: float
    """Lower bound of `nearest` in seconds; infinite if none fits."""

    @property
    def fits(self) -> bool:
        """Whether some layout fits the memory."""
        return self.nearest is not None


class WarmStart(NamedTuple):
    """A plan to beat that is known before a search begins."""

    search: Search
    """The search with the plan's memory options."""
    best: Prediction
    reused_layouts: tuple[Layout, ...]
    """Similar layouts that move little state, the least first."""


@dataclass(eq=False)
class Search:
    """A search over one pool of devices with one workload; caches what it works out."""

    work: Workload
    pool: DevicePool
    cost: CostModel
    impossible: dict[ParallelDims, str] = field(default_factory=dict)
    """Degrees that cannot run at all, with the reason."""
    complete: bool = True
    """False if some orders of devices were left out."""
    warm_start: WarmStart | None = None
    """The plan to beat when the new plan replaces another."""
    _units: dict[int, tuple[list[TensorParallelGroup], list[int]]] = field(default_factory=dict)
    _unit_counts: dict[int, UnitCounts] = field(default_factory=dict)
    _orders: dict[ParallelDims, list[Placement]] = field(default_factory=dict)
    _knapsack_bounds: dict[tuple[ParallelDims, ScheduleSpec, int], KnapsackBound] = field(default_factory=dict)

    def with_memory_options(self, memory_options: MemoryOptions) -> Search:
        """A search of the same pool with other memory options."""
        return self._with(replace(self.work, memory_options=memory_options))

    def with_codec(self, codec: Codec) -> Search:
        """A search of the same pool with another gradient codec."""
        other = self._with(replace(self.work, codec=codec))
        other.impossible = self.impossible
        return other

    def _with(self, work: Workload) -> Search:
        other = Search(work, self.pool, self.cost.with_work(work))
        # Tensor-parallel groups and their orders do not depend on the workload.
        other._units, other._orders, other.complete = self._units, self._orders, self.complete
        return other

    @cached_property
    def closed_form_bound(self) -> ClosedFormBound:
        return ClosedFormBound(self.cost)

    @cached_property
    def memory_feasibility(self) -> MemoryFeasibility:
        return MemoryFeasibility(self.cost)

    def knapsack_bound(self, dims: ParallelDims, schedule_spec: ScheduleSpec, size: int) -> KnapsackBound:
        """The cached knapsack bound of these degrees, this schedule and this micro-batch size."""
        key = (dims, schedule_spec, size)
        if key not in self._knapsack_bounds:
            shards = self._most_shards(dims)
            self._knapsack_bounds[key] = KnapsackBound(
                self.cost, self.unit_counts(dims[2]), dims, schedule_spec, size, shards
            )
        return self._knapsack_bounds[key]

    def units(self, tp: int) -> tuple[list[TensorParallelGroup], list[int]]:
        """The tensor-parallel groups of that size, and the number of each one's class of interchangeable groups."""
        if tp not in self._units:
            units = make_tensor_parallel_groups(self.pool, tp)
            few = len(units) <= MAX_COMPARED_UNITS
            message = self.work.stage_boundary_bytes(1)
            classes = interchangeable_classes(units, self.pool.links, message) if few else list(range(len(units)))
            self._units[tp] = (units, classes)
        return self._units[tp]

    def candidate_dims(self) -> list[ParallelDims]:
        """The degrees to try; those that cannot run are put into `impossible`."""
        if self.work.fixed is not None:
            given = self.work.fixed
            candidates = [ParallelDims(given.pp, given.dp, given.tp)]
        else:
            candidates = enumerate_dims(len(self.pool.devices), self.work.spec, self.work.sequences)
        found = []
        for dims in candidates:
            reason = self._why_not(dims)
            if reason:
                self.impossible[dims] = reason
            else:
                found.append(dims)
        return found

    def best(
        self,
        candidate_dims: list[ParallelDims],
        sizes: list[int],
        patience: int | None = None,
        best: Prediction | None = None,
    ) -> Prediction | None:
        """The fastest layout that fits, of these degrees and micro-batch sizes; None if none fits.

        Args:
            best: the plan to beat, from another search.
            patience: stop after this many options in a row without a better one. Default: try all that could still win.
        """
        queue = [
            (
                self.closed_form_bound.step_s(self.unit_counts(dims[2]), dims[0], dims[1], schedule_spec, size),
                number,
                dims,
                schedule_spec,
                size,
            )
            for number, (dims, schedule_spec, size) in enumerate(self.options(candidate_dims, sizes))
        ]
        waited = 0
        for bound, _, dims, schedule_spec, size in sorted(queue):
            if best is not None and (bound >= best.total or waited == patience):
                break
            found = self.evaluate(dims, schedule_spec, size, best).best
            waited = 0 if found is not best else waited + 1
            best = found
        return best

    def options(
        self, candidate_dims: list[ParallelDims], sizes: list[int] | None = None
    ) -> Iterator[tuple[ParallelDims, ScheduleSpec, int]]:
        """All combinations of degrees, schedules and micro-batch sizes; by default the sizes that divide the batch."""
        for dims in candidate_dims:
            for size in self.work.micro_batch_sizes() if sizes is None else sizes:
                if self.work.sequences // size >= dims[1]:
                    yield from ((dims, schedule_spec, size) for schedule_spec in self.work.schedule_specs(dims[0]))

    def unit_counts(self, tp: int) -> UnitCounts:
        """The tensor-parallel groups of that size, counted by kind."""
        if tp not in self._unit_counts:
            self._unit_counts[tp] = UnitCounts(self.cost, self.units(tp)[0])
        return self._unit_counts[tp]

    def evaluate(
        self,
        dims: ParallelDims,
        schedule_spec: ScheduleSpec,
        size: int,
        best: Prediction | None,
        most: int | None = None,
        *,
        placement: Sequence[Placement] | None = None,
    ) -> Evaluation:
        """Evaluate the layouts of these degrees with this schedule and micro-batch size, and compare them with `best`.

        Args:
            most: the largest number of placements to evaluate; default: all.
            placement: placements to evaluate; default: the likely ones.
        """
        pp, dp, _ = dims
        if why_no_layout(self.cost, pp, dp, schedule_spec, size):
            return Evaluation(best, None, math.inf)
        limit = math.inf if best is None else best.total * (1 - 1e-9)
        nearest, least = None, math.inf
        unit_counts = self.unit_counts(dims[2])
        for each in (self._placements(dims) if placement is None else placement)[:most]:
            if not self.memory_feasibility.can_hold(
                unit_counts, dims, shard_group_size(each, self.work.memory_options), schedule_spec, size
            ):
                continue
            layout = fit_layout(self.cost, each, schedule_spec, size)
            if layout.memory_shortage(self.cost.memory):
                continue
            bound = lower_bound(self.cost, layout)
            if nearest is None or bound < least:
                nearest, least = layout, bound
            if bound >= limit:
                continue
            found = predict(self.cost, layout)
            if found.total < limit:
                best, limit = found, found.total * (1 - 1e-9)
        return Evaluation(best, nearest, least)

    def _placements(self, dims: ParallelDims) -> list[Placement]:
        if dims not in self._orders:
            pp, dp, tp = dims
            units, classes = self.units(tp)
            orders, complete = placements(units, classes, pp, dp, lambda a, b: self.cost.send_s(a, b, 1))
            self._orders[dims] = orders
            self.complete = self.complete and complete
        return [placement for placement in self._orders[dims] if self.can_shard(placement)]

    def can_shard(self, placement: Placement) -> bool:
        """Whether the placement has replicas to shard over, or no sharding is asked for."""
        if self.work.memory_options.zero == 0:
            return True
        shards = shard_group_size(placement, self.work.memory_options)
        # With degrees given by hand, `check_runnable` refuses a codec that cannot be sharded, and says why.
        return shards > 1 and (shards < len(placement) or self.work.fixed is not None or self.work.may_shard_gradients)

    def shortage(self, dims: ParallelDims) -> MemoryShortage | str | None:
        """Why no layout of these degrees runs: the device short of memory with the smallest micro-batch, or a sentence.

        None if the layout fits.
        """
        pp, dp, _ = dims
        reason: str | None = None
        for size in self.work.micro_batch_sizes():
            for schedule_spec in self.work.schedule_specs(pp):
                undefined = why_no_layout(self.cost, pp, dp, schedule_spec, size)
                if undefined:
                    reason = reason or undefined
                    continue
                for placement in self._placements(dims)[:1]:
                    return fit_layout(self.cost, placement, schedule_spec, size).memory_shortage(self.cost.memory)
                return WHY_NO_SHARDING
        return reason

    def shortage_at(self, placement: Placement, schedule_spec: ScheduleSpec, size: int) -> MemoryShortage | None:
        """The device that is short of memory with this placement; None if the layout fits."""
        return fit_layout(self.cost, placement, schedule_spec, size).memory_shortage(self.cost.memory)

    def may_fit(self, dims: ParallelDims, schedule_spec: ScheduleSpec, size: int) -> bool:
        """False if no placement of these degrees has room for the model."""
        return self.memory_feasibility.can_hold(
            self.unit_counts(dims[2]), dims, self._most_shards(dims), schedule_spec, size
        )

    def is_too_large(self, dims: ParallelDims, schedule_spec: ScheduleSpec, size: int) -> bool:
        """Whether `may_fit` is already known to be False."""
        return self.memory_feasibility.is_too_large(dims, self._most_shards(dims), schedule_spec, size)

    def any_may_fit(self, dims: ParallelDims, size: int) -> bool:
        """False if only V-shaped schedules could have room for the model, judged by `FEWEST_ACTIVATIONS`."""
        memory_options = self.work.memory_options
        if memory_options.zero or memory_options.recompute != "none":
            return True  # with several stages a rank, less is gathered or recomputed at once
        return self.may_fit(dims, FEWEST_ACTIVATIONS, size)

    def placements_by(self, knapsack_bound: KnapsackBound, limit_s: float) -> list[Placement]:
        """Placements that may finish within `limit_s` seconds by the knapsack bound."""
        mixtures = knapsack_bound.mixtures_by(limit_s)
        if mixtures is None:
            return []
        units = self.units(knapsack_bound.tp)[0]
        classes = [[unit for unit in units if self.cost.kind(unit) in each.kinds] for each in knapsack_bound.classes]
        return [placement for placement in placements_of_mixtures(classes, mixtures) if self.can_shard(placement)]

    def any_feasible_within(self, dims: ParallelDims, size: int, limit_s: float) -> bool:
        """False if only V-shaped schedules could finish within `limit_s` seconds, even with unlimited memory."""
        unit_counts, shards = self.unit_counts(dims[2]), self._most_shards(dims)
        return KnapsackBound(
            self.cost, unit_counts, dims, ScheduleSpec("1f1b"), size, shards, waits=False
        ).feasible_within(limit_s)

    def _most_shards(self, dims: ParallelDims) -> int:
        """The largest number of replicas that share one state."""
        if self.work.memory_options.zero and self.work.memory_options.shard == "node":
            return max(
                (shard_group_size(placement, self.work.memory_options) for placement in self._placements(dims)),
                default=1,
            )
        return dims[1] if self.work.memory_options.zero else 1

    def _why_not(self, dims: ParallelDims) -> str | None:
        pp, dp, tp = dims
        units = len(self.units(tp)[0])
        if reason := self.work.spec.tensor_parallel_error(tp):
            return reason
        if reason := self.work.spec.pipeline_error(pp):
            return reason
        if self.work.compiled and tp > 1:
            return f"compile is true, and {WHY_NOT_COMPILED_TP}"
        if pp > self.work.spec.layers:
            return f"the model has {self.work.spec.layers} blocks, fewer than pp {pp}"
        if self.work.memory_options.zero and dp == 1:
            return f"zero {self.work.memory_options.zero} shards over replicas, dp 1 is one"
        if dp > self.work.sequences:
            return f"batch.global {self.work.sequences} is less than one sequence for each of dp {dp} replicas"
        if pp * dp > units and tp == 1:
            return f"{pp * dp} devices are needed, {units} are usable"
        if pp * dp > units:
            return f"pp × dp = {pp * dp} groups of {tp} equal devices are needed, there are {units}"
        return None
