"""From a topology and a run file to plan.json: search, prediction and reasons."""

from hpctrain.planner.make import Solver, make_plan

__all__ = ["Solver", "make_plan"]
