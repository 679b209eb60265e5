"""From a topology and a run file to plan.json: search, prediction and reasons."""

from hpctrain.planner.make import PlanRequest, make_plan
from hpctrain.planner.search.solve import Solver

__all__ = ["PlanRequest", "Solver", "make_plan"]
