"""A pipeline cut where the model itself has a seam."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.simulate.predict import Prediction, predict

MAX_SEAM_SLOWDOWN = 1.02
"""What the step may take longer for it: less than a prediction is off by."""


def cut_at_seam(cost: CostModel, best: Prediction) -> Prediction:
    """The plan with its nearest cut moved onto the seam, where that fits and costs next to nothing; else the plan.

    The cost model has one size for the message of every cut, that of the largest, so it does not see what a cut at the
    seam saves.
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
