"""Lower bound of the step time that counts whole blocks, whole micro-batches and memory, with the same cut for all
replicas.

The bound asks whether any layout finishes within a time limit. A column is the tensor-parallel groups of one pipeline
rank over all replicas; all of them hold the same blocks. A column with b blocks can do a step's micro-batches only if
there are at most as many as the sum over its groups of floor(limit / time of a micro-batch), where memory limits each
term. Groups of one class (`UnitClass`) count alike, with the least time and the largest memory of any of them; a
mixture says how many groups of each class a column has. For each rank and each mixture, the bound computes the largest
such b. A knapsack over ranks then gives the most blocks that all columns hold together, with no more groups of a class
than there are. If these are fewer blocks than the model has, no layout finishes within the limit.

The bound relaxes two conditions. Each column may distribute its micro-batches over replicas as suits it best; only the
largest number of any replica is common to all columns. A pass through the pipeline counts as if all its groups were the
fastest.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from hpctrain.planner.bounds.arrays import INFEASIBLE, ROUNDING, FloatArray
from hpctrain.planner.bounds.interleaved_ranks import cap_by_passes
from hpctrain.planner.bounds.memory_feasibility import micro_batches_held
from hpctrain.planner.bounds.rank_times import RankTimes, warmup_forwards


class KnapsackBound(RankTimes):
    """Lower bound of the step time of one option, which counts whole blocks, whole micro-batches and memory."""

    def feasible_within(self, limit_s: float) -> bool:
        """Return False if the bound proves, without regard to memory, that no layout finishes within
        `limit_s` seconds.
        """
        return self._holds_all_blocks(self._blocks(self._caps(limit_s), limit_s))

    def may_finish_within(self, limit_s: float) -> bool:
        """Return False if the bound proves that no layout that fits the memory finishes within `limit_s` seconds."""
        caps = np.minimum(self._caps(limit_s), self._memory_caps)
        return self._holds_all_blocks(self._blocks(caps, limit_s))

    def _holds_all_blocks(self, most_blocks: FloatArray) -> bool:
        """Return whether the pipeline ranks together can hold all blocks of the model; argument as in `_knapsack`."""
        # Without regard to how many groups of each class there are, this is known at once.
        if most_blocks.max(axis=2).sum(axis=0).max() < self.layers:
            return False
        return self._knapsack(most_blocks)[0] >= self.layers

    def bracket(self, low: float, high: float, memory: bool = True) -> tuple[float, float]:
        """Return two times in seconds that differ by at most the share `SearchLimits.bound_tolerance`. No layout is
        faster than the first; the bound does not exclude a layout as fast as the second.

        Args:
            low: a known lower bound in seconds, at which the bisection begins.
            high: upper end of the bisection; both results are `high` if it is not above `low`, or if no layout finishes
                by then.
            memory: whether to count the memory; without it the bound is weaker and takes less time to compute.
        """
        allows = self.may_finish_within if memory else self.feasible_within
        if high <= low or not allows(high):
            return high, high
        while high - low > self.limits.bound_tolerance * high:
            middle = (low + high) / 2
            low, high = (low, middle) if allows(middle) else (middle, high)
        return low, high

    def find_feasible_time(self, low: float) -> float:
        """Return the first of low, 2·low, 4·low, ... seconds within which, by this bound, a layout of the option may
        finish a step. At most `SearchLimits.max_doublings` such times are tried; if no layout may finish within any of
        them, return `low`.
        """
        times = (low * 2**power for power in range(self.limits.max_doublings))
        return next((seconds for seconds in times if self.may_finish_within(seconds)), low)

    @cached_property
    def _memory_caps(self) -> FloatArray:
        """[rank, class, blocks] -> the most micro-batches for which a tensor-parallel group of the class has memory
        in addition to this number of blocks.
        """
        memory, most = self.cost.memory, -(-self.count // self.dp)
        shards = self.shards if memory.work.memory_options.zero else 1
        return np.array(
            [
                [micro_batches_held(memory, self.option.role(c.kind, rank, shards, 1), c.memory_bytes, most)
                for c in self.classes]
                for rank in range(self.pp)
            ]
        )  # fmt: skip

    def _blocks(self, caps: FloatArray, limit_s: float) -> FloatArray:
        """Return [rank, window, mixture] -> the most blocks that a column of this mixture can hold; `INFEASIBLE` if
        these are fewer than the rank must hold (one for each of its stages, none on the first and the last rank), or if
        a step of this window takes longer than `limit_s` seconds.

        A column is the tensor-parallel groups of one pipeline rank over all replicas. A mixture says how many groups of
        each class are in the column. A window is a range in which the largest number of micro-batches of a replica
        lies.

        Args:
            caps: [rank, class, blocks] -> the most micro-batches of a tensor-parallel group that holds these blocks.
        """
        windows = self._windows(-(-self.count // self.dp), self._most_micro_batches(caps))
        used = self.mixtures > 0
        # [rank, mixture, blocks]: whether every class of a mixture can do one micro-batch, and the most that any class
        # can do.
        able = np.where(used[None, :, :, None], caps[:, None], np.inf).min(axis=2) >= 1
        best = np.where(used[None, :, :, None], caps[:, None], 0).max(axis=2)
        most_blocks = np.empty((self.pp, len(windows), len(self.mixtures)))
        after_s = self.first_sum_s + float(self.times.update[self.first].min())
        for index, (low, high) in enumerate(windows):
            if self.passes.step_s(low) + after_s > limit_s:
                most_blocks[:, index] = INFEASIBLE
                continue
            together = np.einsum("mk,rkb->rmb", self.mixtures, np.minimum(caps, high))
            fits = able & (together >= self.count) & (best >= low)
            # Times and bytes grow with the blocks, so the numbers of blocks that fit come first.
            most_blocks[:, index] = fits.sum(axis=2) - 1
        ends = np.isin(np.arange(self.pp), (self.first, self.last))
        most_blocks[most_blocks < np.where(ends, 0, self.option.virtual_stages)[:, None, None]] = INFEASIBLE
        return most_blocks

    def _most_micro_batches(self, caps: FloatArray) -> int:
        """Return the most micro-batches that any replica can have in a layout.

        Args:
            caps: [rank, class, blocks] -> the most micro-batches of a tensor-parallel group that holds these blocks.
        """
        least = -(-self.count // self.dp)
        if self.cost.work.memory_options.equal_micro_batches or len(self.classes) == 1:
            return least
        return max(least, int(min(self.count - self.dp + 1, caps.max())))

    def _knapsack(self, most_blocks: FloatArray) -> tuple[float, list[FloatArray]]:
        """Return the most blocks that all pipeline ranks hold together, and the states of the knapsack.

        Each pipeline rank takes one mixture (`_blocks`), and all pipeline ranks take the same window: a range of the
        largest number of micro-batches of any replica. The window with the most blocks counts.

        Args:
            most_blocks: [pipeline rank, window, mixture] -> the most blocks that the pipeline rank can hold.

        Returns:
            The blocks, and the states for `mixtures_by`: [number of pipeline ranks filled so far] -> [window, groups
            used of each class but the last] -> blocks.
        """
        *firsts, last = (unit_class.number for unit_class in self.classes)
        sizes = [min(number, self.pp * self.dp) + 1 for number in firsts]
        reached = np.full((most_blocks.shape[1], *sizes), INFEASIBLE)
        reached.reshape(len(reached), -1)[:, 0] = 0
        states = [reached]
        for column in most_blocks:
            after = np.full_like(reached, INFEASIBLE)
            for blocks, mixture in zip(column.T, self.mixtures, strict=True):
                taken = mixture[:-1].tolist()
                if blocks.max() < 0 or any(number >= size for number, size in zip(taken, sizes, strict=True)):
                    continue
                to = (slice(None), *(slice(number, None) for number in taken))
                of = (slice(None), *(slice(0, size - number) for number, size in zip(taken, sizes, strict=True)))
                np.maximum(after[to], reached[of] + blocks.reshape(-1, *(1 for _ in sizes)), out=after[to])
            reached = after
            states.append(after)
        if sizes:
            # The remaining groups are of the last class.
            remaining = self.pp * self.dp - np.indices(sizes).sum(axis=0)
            reached[:, (remaining < 0) | (remaining > last)] = INFEASIBLE
        return float(reached.max()), states

    def mixtures_by(self, limit_s: float) -> list[tuple[int, ...]] | None:
        """Return [pipeline rank] -> number of tensor-parallel groups of each class, the fastest class first, with which
        all ranks together hold the most blocks.

        The groups of each rank end their micro-batches within `limit_s` seconds. The result is None if all ranks
        together hold fewer blocks than the model has.
        """
        most_blocks = self._blocks(np.minimum(self._caps(limit_s), self._memory_caps), limit_s)
        most, states = self._knapsack(most_blocks)
        if most < self.layers:
            return None
        at = tuple(map(int, np.unravel_index(int(states[-1].argmax()), states[-1].shape)))
        chosen: list[tuple[int, ...]] = []
        for rank in range(self.pp - 1, -1, -1):
            window, *used = at
            for gained, mixture in zip(most_blocks[rank, window], self.mixtures.tolist(), strict=True):
                before = tuple(a - b for a, b in zip(used, mixture[:-1], strict=True))
                if min(before, default=0) < 0 or gained < 0:
                    continue
                previous = (window, *before)
                if states[rank][previous] + gained == states[rank + 1][at]:
                    chosen.append(tuple(mixture))
                    at = previous
                    break
        return chosen[::-1]

    def _caps(self, limit_s: float) -> FloatArray:
        """Return [rank, class, blocks] -> the most micro-batches that a tensor-parallel group of the class ends within
        `limit_s` seconds if it holds this number of blocks.

        Every column (the tensor-parallel groups of one pipeline rank over all replicas) counts as lying within one node
        if one column can.
        """
        times, option = self.times, self.option
        forward, backward, both = times.forward, times.backward, times.both
        tail = times.sums + times.update
        caps = (limit_s - self.fill[:, None, None] * self.waits - tail) / both
        if self.pp > 1 and self.waits:
            # At most this many forwards come before a rank's first backward, which waits for a pass through all stages.
            early = warmup_forwards(option)[:, None, None]
            waits = [(limit_s - self.passes.forward_s - tail, both - forward)]
            if option.virtual_stages == 1 and not option.splits_backward:
                # The first backward also waits for the backward through all later ranks. With gpipe, all forwards of
                # all ranks come before the last rank's first backward.
                at_first = np.full_like(tail, self.first_sum_s)
                at_first[self.first] = times.late[self.first]
                waits.append((limit_s - self.passes.both_s - at_first - times.update + backward, backward))
            for remaining, action_s in waits:
                late = (remaining + early * forward) / both
                caps = np.minimum(caps, np.where(late >= early, late, np.minimum(early, remaining / action_s)))
            if option.schedule_spec.name == "1f1b":
                # The first rank starts a further micro-batch only when an earlier micro-batch is back from all ranks.
                trips = (limit_s - tail[0]) / self.passes.both_s * (1 + ROUNDING)
                caps[0] = np.minimum(caps[0], self.pp * np.floor(np.maximum(trips, 0)))
        caps = np.floor(np.maximum(caps, 0) * (1 + ROUNDING) + ROUNDING)
        if option.schedule_spec.name == "interleaved_1f1b" and self.waits:
            remaining = limit_s * (1 + ROUNDING) - self.passes.both_s - self.first_sum_s - times.update
            caps = cap_by_passes(self.classes, caps, both, remaining)
        return np.asarray(caps)

    def _windows(self, least: int, most: int) -> list[tuple[int, int]]:
        """Return ranges (first, last), both included, that together cover `least` to `most`, counts of a replica's
        micro-batches; ranges of small counts are narrower.
        """
        windows: list[tuple[int, int]] = []
        start, width, limit = least, 0, self.limits.max_windows
        while start <= most:
            end = most if len(windows) == limit - 1 else min(most, start + width)
            windows.append((start, end))
            start, width = end + 1, max(2 * width, (most - least) // 2**limit, 1)
        return windows
