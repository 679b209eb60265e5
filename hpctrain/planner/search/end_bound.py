"""The final lower bound of a search, from the options that it evaluated and those that it skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.planner.bounds.ideal import ideal_step_s
from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.layout.degrees import EXHAUSTIVE_DEVICES, min_devices_used
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.search.space import Candidate, CandidateQueue
from hpctrain.planner.simulate.predict import Prediction

BOUND_TOLERANCE = 1e-3
"""Relative width at which the bisection for the bound of a skipped option ends."""


def min_bound_s(
    candidates: CandidateQueue,
    evaluated: Sequence[tuple[Candidate, KnapsackBound]],
    left: Sequence[Candidate],
    best: Prediction | None,
) -> float:
    """The smallest knapsack bound in seconds of the options that were evaluated fully or skipped.

    Args:
        left: the skipped options.
    """
    if best is None:
        return min((candidate.bound_s for candidate, _ in evaluated), default=math.inf)
    lowest = best.total
    for candidate, knapsack_bound in sorted(evaluated, key=lambda each: each[0].bound_s):
        lowest, _ = knapsack_bound.bracket(candidate.bound_s, lowest)
    for candidate in sorted(left, key=lambda each: each.bound_s):
        assert candidate.schedule_spec is not None, "only candidates with a schedule are left"
        knapsack_bound = candidates.search(candidate.memory_options).knapsack_bound(
            candidate.dims, candidate.schedule_spec, candidate.size
        )
        # Memory is not checked: that would take most of the time that skipping saves.
        low, high = candidate.bound_s, lowest
        if low >= high or not knapsack_bound.feasible_within(high):
            continue
        while high - low > BOUND_TOLERANCE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if knapsack_bound.feasible_within(middle) else (middle, high)
        lowest = low
    return lowest


def overall_bound(plain: Search, best: Prediction | None, lowest: float) -> float:
    """Return a lower bound in seconds for all plans, also those that leave more devices idle than the search tries.

    Args:
        lowest: seconds that none of the tried options beats.
    """
    pool, work = plain.pool, plain.work
    if work.fixed is None and len(pool.devices) > EXHAUSTIVE_DEVICES:
        used = sorted(pool.devices, key=lambda device: -device.flops)[: min_devices_used(len(pool.devices)) - 1]
        fastest = max(pool.devices, key=lambda device: device.bytes_per_s).bytes_per_s
        same = tuple(replace(device, bytes_per_s=fastest) for device in used)
        lowest = min(lowest, ideal_step_s(replace(pool, devices=same), work))
        # Numbers of replicas that leave few devices idle are not all tried either.
        lowest = min(lowest, ideal_step_s(pool, work))
    bound = max(lowest if math.isfinite(lowest) else 0.0, ideal_step_s(pool, work))
    return bound if best is None else min(bound, best.total)
