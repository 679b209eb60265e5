"""Simulated annealing of a finished plan: what the planner's search left to gain, by the same cost model."""

from __future__ import annotations

import random
from dataclasses import replace

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.search.layout_search import ACTIONS_OF_A_GROUP, GROUPS_OF_A_TRY, anneal, simulated_actions
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import CandidateQueue
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology

ANNEALING_EVALUATIONS = 10_000
"""About how many layouts the annealing of a plan tries."""
ANNEALING_SLOWDOWN = 0.03
"""Largest share by which a first move of the annealing may make the step longer."""


def annealed_pct(run: Run, topology: Topology, plan: Plan, evaluations: int = ANNEALING_EVALUATIONS) -> float:
    """Return by how many percent simulated annealing from a plan shortens its predicted step. It moves devices, blocks
    and micro-batches, and changes micro-batch size, schedule and memory options, with a fixed seed.

    Args:
        plan: the planner's plan for this run on this topology.
        evaluations: end after as much work as so many predictions of the plan's layout take. About as many layouts are
            tried: more if many of them are dropped without a prediction, fewer if their predictions simulate more
            actions than that of the plan.
    """
    made, pool = layout_of_plan(run, run.spec(), plan, topology).layout, make_device_pool(run, topology)
    work, _ = workload_of(run, run.spec())
    space = SearchSpace(pool, CostModel(replace(work, memory_options=made.memory_options), pool.links))
    by_devices = {frozenset(unit.device_ids): unit for unit in space.units(plan.tp)}
    rows = ((by_devices[frozenset(unit.device_ids)] for unit in row) for row in made.placement)
    layout = replace(made, placement=Placement(map(tuple, rows)))
    planned = predict(space.cost, layout)
    of_a_try = GROUPS_OF_A_TRY + layout.pp * layout.dp + simulated_actions(layout) / ACTIONS_OF_A_GROUP
    best, _ = anneal(
        CandidateQueue(space), space, planned, evaluations * of_a_try, ANNEALING_SLOWDOWN, random.Random(1)
    )
    return 100 * (1 - best.total / planned.total)
