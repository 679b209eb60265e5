"""Evaluation of options: their layouts on the likely placements, and the fastest of these that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpctrain.planner.cost.memory_options import shard_group_size
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.layout import Layout, Option
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.simulate.predict import Prediction, lower_bound, predict


class Evaluation(NamedTuple):
    """The result of evaluating an option."""

    best: Prediction | None
    nearest: Layout | None
    """The layout with the smallest bound among those that fit; None if none fits."""
    bound_s: float
    """Lower bound of `nearest` in seconds; infinite if none fits."""

    @property
    def fits(self) -> bool:
        """Whether some layout fits the memory."""
        return self.nearest is not None


def evaluate(
    space: SearchSpace,
    option: Option,
    best: Prediction | None,
    placements: Sequence[Placement] | None = None,
) -> Evaluation:
    """Evaluate the layouts of an option, and compare them with `best`.

    Args:
        placements: placements to evaluate; default: all likely ones.
    """
    nearest, least = None, math.inf
    if space.why_no_layout(option):
        return Evaluation(best, nearest, least)
    limit = math.inf if best is None else best.total * (1 - 1e-9)
    for placement in space.placements(option.dims) if placements is None else placements:
        if not space.bounds.can_hold(option, shard_group_size(placement, space.work.memory_options)):
            continue
        layout = space.fit_layout(placement, option)
        if layout.memory_shortage(space.cost.memory):
            continue
        bound = lower_bound(space.cost, layout)
        if nearest is None or bound < least:
            nearest, least = layout, bound
        if bound >= limit:
            continue
        prediction = predict(space.cost, layout)
        if prediction.total < limit:
            best, limit = prediction, prediction.total * (1 - 1e-9)
    return Evaluation(best, nearest, least)


def best_of(space: SearchSpace, options: Iterable[Option], patience: int | None = None) -> Prediction | None:
    """Return the fastest layout of these options that fits; None if none fits.

    Args:
        patience: stop after this many options in a row without a better layout. None: try all that could still win.
    """
    queue = sorted((space.bounds.step_s(option), number, option) for number, option in enumerate(options))
    best: Prediction | None = None
    waited = 0
    for bound, _, option in queue:
        if best is not None and (bound >= best.total or waited == patience):
            break
        before, best = best, evaluate(space, option, best).best
        waited = 0 if best is not before else waited + 1
    return best
