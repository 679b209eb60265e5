"""Makes plan.json from a topology and a run file: searches layouts, predicts their time and memory, and gives
reasons.
"""

from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.planner.search.solve import Solver

__all__ = ["PlanRequest", "Solver", "make_plan"]
