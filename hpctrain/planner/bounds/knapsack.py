"""Lower bound that counts whole blocks, whole micro-batches and memory, with the same cut for all replicas.

A unit is a tensor-parallel group. A column is the units of a pipeline rank over all replicas; all hold the same blocks.
A column with b blocks can do a step's micro-batches only if its units together can: the sum over units of
floor(time / time of a micro-batch), limited by memory. For each rank and each mixture of classes of units, the largest
such b is computed. A knapsack over ranks then gives the most blocks that all columns hold together, with no more units
of a class than there are. If these are fewer than the model has, no layout finishes in the time.

Two things are relaxed. The micro-batches of a column may be distributed over replicas as is best for this column (only
the largest number of any replica is common to all). A pass through the pipeline counts as if all its units were the
fastest. If there are few cuts of the blocks, `hpctrain.planner.bounds.cuts` enumerates them and relaxes neither.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpctrain.planner.bounds.cuts import any_cut_finishes
from hpctrain.planner.bounds.interleaved import cap_by_passes
from hpctrain.planner.bounds.knapsack_memory import micro_batches_held
from hpctrain.planner.bounds.pipeline_passes import warmup_forwards
from hpctrain.planner.bounds.rank_times import RankSeconds, RankTimes
from hpctrain.planner.cost.memory import RankRole
from hpctrain.schedule.generate import SPLIT_BACKWARD_SCHEDULES

FloatArray = NDArray[np.float64]

MAX_WINDOWS = 10
"""Number of ranges into which the largest number of micro-batches of any replica is divided."""
BRACKET_TOLERANCE = 1e-3
"""Relative width at which the bisection for the bound ends."""
INFEASIBLE = -1e6
"""Stands for the blocks of an impossible mixture."""
ROUNDING = 1e-9
MAX_DOUBLINGS = 12
"""Limit of how often a bound is doubled in search of a feasible time."""


class KnapsackBound(RankTimes):
    """The bound for given degrees, schedule and micro-batch size."""

    def feasible_within(self, limit_s: float) -> bool:
        """False if no layout finishes within `limit_s` seconds, even with unlimited memory."""
        return self._knapsack(self._held(self._caps(limit_s), limit_s))[0] >= self.layers

    def may_finish_within(self, limit_s: float) -> bool:
        """False if no layout finishes within `limit_s` seconds."""
        caps = np.minimum(self._caps(limit_s), self._rooms)
        held = self._held(caps, limit_s)
        if self._knapsack(held)[0] < self.layers or not self._may_lie(held, limit_s):
            return False
        return any_cut_finishes(self, caps, held.max(axis=(1, 2)), limit_s)

    def bracket(self, low: float, high: float) -> tuple[float, float]:
        """Return two close times in seconds: no layout beats the first, and this bound allows the second.

        Args:
            low: seconds that no layout beats.
            high: upper end of the bisection; both results are this if no layout finishes by then.
        """
        if high <= low or not self.may_finish_within(high):
            return high, high
        while high - low > BRACKET_TOLERANCE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.may_finish_within(middle) else (middle, high)
        return low, high

    def find_feasible_time(self, low: float) -> float:
        """The first of low, 2·low, 4·low, … seconds that this bound allows; `low` if it allows none of them."""
        found = (low * 2**power for power in range(MAX_DOUBLINGS))
        return next((each for each in found if self.may_finish_within(each)), low)

    @cached_property
    def _rooms(self) -> FloatArray:
        owned = self.shards if self.cost.work.memory_options.zero else 1
        role = RankRole(
            "",
            self.schedule_spec.name,
            self.pp,
            0,
            self.pp * self.schedule_spec.virtual_stages,
            self.dp,
            self.tp,
            owned,
            self.size,
            1,
        )
        rows = []
        for rank in range(self.pp):
            roles = [(role._replace(kind=each.kind, rank=rank), each.memory_bytes) for each in self.classes]
            rows.append([micro_batches_held(self.cost.memory, *each, -(-self.count // self.dp)) for each in roles])
        return np.array(rows)

    def _held(self, caps: FloatArray, limit_s: float) -> FloatArray:
        """[rank, window, mixture] -> the most blocks that such a column can hold.

        Args:
            caps: [rank, class, blocks] -> the most micro-batches of a unit that holds these blocks.
        """
        least = -(-self.count // self.dp)
        even = self.cost.work.memory_options.equal_micro_batches or len(self.classes) == 1
        most = least if even else int(min(self.count - self.dp + 1, caps.max()))
        windows = _windows(least, max(most, least))
        used = self.mixtures > 0
        # [rank, mixture, blocks]: whether each class of a mixture can do one micro-batch, and how many the best can do.
        able = np.where(used[None, :, :, None], caps[:, None], np.inf).min(axis=2) >= 1
        best = np.where(used[None, :, :, None], caps[:, None], 0).max(axis=2)
        held = np.empty((self.pp, len(windows), len(self.mixtures)))
        after_s = self.first_sum_s + float(self.times.update[self.first].min())
        for index, (low, high) in enumerate(windows):
            if self.passes.step_s(low) + after_s > limit_s:
                held[:, index] = INFEASIBLE
                continue
            together = np.einsum("mk,rkb->rmb", self.mixtures, np.minimum(caps, high))
            fits = able & (together >= self.count) & (best >= low)
            # Times and bytes grow with the blocks, so the numbers of blocks that fit come first.
            held[:, index] = fits.sum(axis=2) - 1
        ends = np.array([rank in (self.first, self.last) for rank in range(self.pp)])
        held[held < np.where(ends, 0, self.schedule_spec.virtual_stages)[:, None, None]] = INFEASIBLE
        return held

    def _knapsack(self, held: FloatArray) -> tuple[float, list[FloatArray]]:
        """The most blocks with one mixture for each rank, in the best window, and the states of the knapsack.

        Args:
            held: [rank, window, mixture] -> blocks.

        Returns:
            Blocks, and [rank] -> [window, units of each class but the last] -> blocks up to this rank.
        """
        *told, rest = (each.number for each in self.classes)
        sizes = [min(number, self.pp * self.dp) + 1 for number in told]
        reached = np.full((held.shape[1], *sizes), INFEASIBLE)
        reached.reshape(len(reached), -1)[:, 0] = 0
        way = [reached]
        for column in held:
            after = np.full_like(reached, INFEASIBLE)
            for blocks, mixture in zip(column.T, self.mixtures, strict=True):
                taken = mixture[:-1].tolist()
                if blocks.max() < 0 or any(each >= size for each, size in zip(taken, sizes, strict=True)):
                    continue
                to = (slice(None), *(slice(each, None) for each in taken))
                of = (slice(None), *(slice(0, size - each) for each, size in zip(taken, sizes, strict=True)))
                np.maximum(after[to], reached[of] + blocks.reshape(-1, *(1 for _ in sizes)), out=after[to])
            reached = after
            way.append(after)
        if sizes:
            # The remaining units are of the last class.
            left = self.pp * self.dp - np.indices(sizes).sum(axis=0)
            reached[:, (left < 0) | (left > rest)] = INFEASIBLE
        return float(reached.max()), way

    def _may_lie(self, held: FloatArray, limit_s: float) -> bool:
        """False if the columns cannot hold all blocks when only as many as fit lie within a node.

        A column within a node has a faster all-reduce than one across nodes.

        Args:
            held: [rank, window, mixture] -> blocks if all columns could lie within a node.
        """
        if self.apart is None:
            return True
        far = self._held(np.minimum(self._caps(limit_s, self.apart), self._rooms), limit_s).max(axis=2)
        gained = np.sort(held.max(axis=2) - far, axis=0)[-self.inside :]
        return bool((far.sum(axis=0) + gained.sum(axis=0)).max() >= self.layers)

    def mixtures_by(self, limit_s: float) -> list[tuple[int, ...]] | None:
        """[rank] -> units of each class, the fastest first, with which the columns hold the most blocks in the time.

        None if these are fewer blocks than the model has.
        """
        held = self._held(np.minimum(self._caps(limit_s), self._rooms), limit_s)
        most, way = self._knapsack(held)
        if most < self.layers:
            return None
        at = tuple(int(each) for each in np.unravel_index(int(way[-1].argmax()), way[-1].shape))
        found: list[tuple[int, ...]] = []
        for rank in range(self.pp - 1, -1, -1):
            window, used = at[0], at[1:]
            for number, mixture in enumerate(self.mixtures):
                before = tuple(a - int(b) for a, b in zip(used, mixture[:-1], strict=True))
                gained = held[rank, window, number]
                if (
                    min(before, default=0) >= 0
                    and gained >= 0
                    and way[rank][(window, *before)] + gained == way[rank + 1][at]
                ):
                    found.append(tuple(mixture.tolist()))
                    at = (window, *before)
                    break
        return found[::-1]

    def _caps(self, limit_s: float, times: RankSeconds | None = None) -> FloatArray:
        """[rank, class, blocks] -> micro-batches that a unit ends within `limit_s` seconds."""
        times = times or self.times
        forward, backward, both = times.forward, times.backward, times.both
        tail = times.sums + times.update
        caps = (limit_s - times.way[:, None, None] * self.waits - tail) / both
        if self.pp > 1 and self.waits:
            # At most so many forwards come before a rank's first backward, which waits for a pass through all stages.
            early = warmup_forwards(self.schedule_spec, self.pp)[:, None, None]
            waits = [(limit_s - self.passes.forward_s - tail, both - forward)]
            if self.schedule_spec.virtual_stages == 1 and self.schedule_spec.name not in SPLIT_BACKWARD_SCHEDULES:
                # It also waits for the backward through all later ranks. With gpipe, all forwards of all ranks come
                # before the last rank's first backward.
                at_first = np.full_like(tail, self.first_sum_s)
                at_first[self.first] = times.sums[self.first]
                waits.append((limit_s - self.passes.both_s - at_first - times.update + backward, backward))
            for left, each in waits:
                late = (left + early * forward) / both
                caps = np.minimum(caps, np.where(late >= early, late, np.minimum(early, left / each)))
            if self.schedule_spec.name == "1f1b":
                # The first rank starts a further micro-batch only when an earlier one is back from all ranks.
                trips = (limit_s - tail[0]) / self.passes.both_s * (1 + ROUNDING)
                caps[0] = np.minimum(caps[0], self.pp * np.floor(np.maximum(trips, 0)))
        caps = np.floor(np.maximum(caps, 0) * (1 + ROUNDING) + ROUNDING)
        if self.schedule_spec.name == "interleaved_1f1b" and self.waits:
            left = limit_s * (1 + ROUNDING) - self.passes.both_s - self.first_sum_s - times.update
            caps = cap_by_passes(self.classes, caps, both, left)
        return np.asarray(caps)


def _windows(least: int, most: int) -> list[tuple[int, int]]:
    """Ranges (first, last) that cover all numbers from `least` to `most`; the first ones are narrow."""
    found: list[tuple[int, int]] = []
    start, width = least, 0
    while start <= most:
        end = most if len(found) == MAX_WINDOWS - 1 else min(most, start + width)
        found.append((start, end))
        start, width = end + 1, max(2 * width, (most - least) // 2**MAX_WINDOWS, 1)
    return found
