"""What no plan beats, from what a search looked at and what it left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.planner.bounds.ideal import step_bound
from hpctrain.planner.bounds.knapsack import Columns
from hpctrain.planner.layout.degrees import EVERY_COUNT, least_used
from hpctrain.planner.search.option_search import Search
from hpctrain.planner.search.space import Option, Options
from hpctrain.planner.simulate.predict import Prediction

NEAR_BOUND = 1e-3
"""Relative width at which the search for the bound of what was left ends."""


def least_s(
    options: Options, looked_at: Sequence[tuple[Option, Columns]], left: Sequence[Option], best: Prediction | None
) -> float:
    """The smallest bound by columns, in seconds, of what was looked at closely or left."""
    if best is None:
        return min((option.bound_s for option, _ in looked_at), default=math.inf)
    lowest = best.total
    for option, columns in sorted(looked_at, key=lambda each: each[0].bound_s):
        lowest, _ = columns.bracket(option.bound_s, lowest)
    for option in sorted(left, key=lambda each: each.bound_s):
        assert option.order is not None, "only options with a schedule are left"
        columns = options.search(option.saving).columns(option.shape, option.order, option.size)
        # Without a look at memory, which would take most of the time that is saved.
        low, high = option.bound_s, lowest
        if low >= high or not columns.has_time(high):
            continue
        while high - low > NEAR_BOUND * high:
            middle = (low + high) / 2
            low, high = (low, middle) if columns.has_time(middle) else (middle, high)
        lowest = low
    return lowest


def end_bound(plain: Search, best: Prediction | None, lowest: float) -> float:
    """With the plans that leave more devices idle than those that are tried.

    Args:
        lowest: seconds that nothing of what is tried beats.
    """
    fleet, work = plain.fleet, plain.work
    if work.fixed is None and len(fleet.workers) > EVERY_COUNT:
        used = sorted(fleet.workers, key=lambda worker: -worker.flops)[: least_used(len(fleet.workers)) - 1]
        fastest = max(fleet.workers, key=lambda worker: worker.bytes_per_s).bytes_per_s
        same = tuple(replace(worker, bytes_per_s=fastest) for worker in used)
        lowest = min(lowest, step_bound(replace(fleet, workers=same), work))
        # Nor are all numbers of replicas tried that leave few idle.
        lowest = min(lowest, step_bound(fleet, work))
    bound = max(lowest if math.isfinite(lowest) else 0.0, step_bound(fleet, work))
    return bound if best is None else min(bound, best.total)
