"""Pipeline cut at the model's preferred place ("seam"), as between encoder and decoder."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.simulate.predict import Prediction, predict

MAX_SEAM_SLOWDOWN = 1.02
"""Factor by which the step may be slower for a cut at the seam; less than the error of a prediction."""


def cut_at_seam(cost: CostModel, best: Prediction) -> Prediction:
    """Return the plan with its nearest cut moved to the seam if that fits and costs next to nothing, else the plan.

    The cost model gives the messages of all cuts the size of the largest, so it does not see what a cut at the seam
    saves.
    """
    seam, blocks = cost.work.spec.preferred_cut, best.layout.blocks
    if seam is None or len(blocks) == 1:
        return best
    cuts = list(accumulate(blocks))[:-1]
    nearest = min(range(len(cuts)), key=lambda index: abs(cuts[index] - seam))
    moved = list(blocks)
    moved[nearest] += seam - cuts[nearest]
    moved[nearest + 1] -= seam - cuts[nearest]
    if moved == list(blocks) or min(moved) < 0 or not all(moved[1:-1]):
        return best
    layout = replace(best.layout, blocks=tuple(moved))
    if layout.memory_shortage(cost.memory):
        return best
    made = predict(cost, layout)
    return made if made.total <= MAX_SEAM_SLOWDOWN * best.total else best
