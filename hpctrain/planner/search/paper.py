"""Solver `paper`: equation (1) by greedy co-location, equation (7) by a grid over the micro-batch count M.

It exists to reproduce the paper. Equation (7) as printed has no bubble and no cost per micro-batch, so it tends to the
smallest M. The default solver is `auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.even_parts import even_parts
from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup, nearest_chain
from hpctrain.planner.layout.layout import Layout, MemoryShortage
from hpctrain.planner.search.neighbours import WHY_NO_SHARDING
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.plan.plan import ParallelDims

GRID = (2, 4, 8, 16)
"""Micro-batch counts M over which equation (7) is minimised (the paper, section 3.4)."""


def solve_as_paper(space: SearchSpace) -> ChosenPlan:
    """Plan by the rules of the paper that this project implements.

    Tensor parallelism stays within nodes, then replicas within nodes; stages go across nodes. The number of
    tensor-parallel groups is P = G·R with G stages and R replicas.

    Raises:
        InputError: no micro-batch count M of the paper's grid divides the batch, or the run asks for ZeRO on a
            placement that cannot shard the training state.
        RefusedError: no M of the grid fits the memory.
    """
    cost, work = space.cost, space.work
    pp, dp, tp = _degrees(space.pool, work)
    stages = _stage_units(space, pp, dp, tp)
    distance = _distances(cost, [unit for row in stages for unit in row])
    # [stage, stage] -> the largest distance of any replica
    between = distance.reshape(len(stages), dp, len(stages), dp).diagonal(axis1=1, axis2=3).max(axis=2)
    order, objective = greedy_colocation(between, pp, float(work.stage_boundary_bytes(1)))
    placement = Placement(tuple(stages[index][replica] for index in order) for replica in range(dp))
    layers = work.spec.layers
    blocks = even_parts(layers, pp)
    layout, text = _choose_micro_batches(cost, placement, blocks)
    if not space.can_shard(placement):
        raise InputError(f"parallel: {WHY_NO_SHARDING}")
    note = (
        f"Solved by the paper's rules: equation (1), greedy co-location on shortest paths with edge weight 1/b, has "
        f"the objective {objective:.6g} s per row at pp {pp}; blocks are cut evenly."
    )
    return ChosenPlan(space, predict(cost, layout), [], [note, text], ideal_step_s(space.pool, work))


def greedy_colocation(distance: NDArray[np.float64], count: int, message_bytes: float) -> tuple[list[int], float]:
    """Solve equation (1) greedily: order `count` places for a small sum of c·d(place, next place).

    Each place is tried as the start; the best order wins.

    Args:
        distance: [places, places], shortest-path distances d in seconds per byte.
        message_bytes: c, bytes of a stage message; equal at all boundaries.

    Returns:
        The order, and the objective in seconds.
    """

    def chain(start: int) -> list[int]:
        others = [place for place in range(len(distance)) if place != start]
        return nearest_chain([start, *others], lambda a, b: float(distance[a, b]))[:count]

    def objective(order: list[int]) -> float:
        return message_bytes * sum(float(distance[a, b]) for a, b in pairwise(order))

    best = min(map(chain, range(len(distance))), key=objective)
    return best, objective(best)


def equation_7(stages: int, layers: int, micro_batches: int, step_s: float, send_s: float) -> float:
    """Return equation (7) of the paper as printed, in seconds: G/L · M·T_step + (M − 1)·T_comm."""
    return stages / layers * micro_batches * step_s + (micro_batches - 1) * send_s


def _degrees(pool: DevicePool, work: Workload) -> tuple[int, int, int]:
    if work.fixed is not None:
        return work.fixed.pp, work.fixed.dp, work.fixed.tp
    nodes = pool.by_node()
    devices = min(len(devices) for devices in nodes.values())
    tp = max(tp for tp in range(1, devices + 1) if devices % tp == 0 and work.spec.tensor_parallel_error(tp) is None)
    if work.spec.pipeline_error(2) is not None:
        return 1, len(nodes) * devices // tp, tp
    return min(len(nodes), work.spec.layers), devices // tp, tp


def _stage_units(space: SearchSpace, pp: int, dp: int, tp: int) -> list[list[TensorParallelGroup]]:
    """Candidates for a stage, each of `dp` tensor-parallel groups: within a node if enough groups fit, else across
    nodes.
    """
    units = space.units(tp)
    by_node: dict[str, list[TensorParallelGroup]] = {}
    for unit in units:
        by_node.setdefault(unit.node, []).append(unit)
    groups = [row[start : start + dp] for row in by_node.values() for start in range(0, len(row) - dp + 1, dp)]
    if len(groups) < pp:
        groups = [units[start : start + dp] for start in range(0, len(units) - dp + 1, dp)]
    if len(groups) < pp:
        raise RefusedError(
            f"parallel: {ParallelDims(pp, dp, tp)} needs {pp} groups of {dp * tp} devices, the topology has "
            f"{len(groups)}; lower a degree or add nodes"
        )
    return groups


def _distances(cost: CostModel, units: Sequence[TensorParallelGroup]) -> NDArray[np.float64]:
    """[group, group] -> shortest-path distance between tensor-parallel groups in seconds per byte; an edge has length
    1/b.
    """
    from scipy.sparse.csgraph import shortest_path  # a third of an agent's start-up, for this solver only

    weights = np.array([[cost.links.between(a.device_ids[0], b.device_ids[0])[1] for b in units] for a in units])
    # scipy reads values close to 0 as "no edge", so distances are multiples of the fastest link's.
    unit = float(weights[weights > 0].min(initial=1.0))
    relative = np.maximum(weights / unit, 1e-6)
    np.fill_diagonal(relative, 0.0)
    distances: NDArray[np.float64] = shortest_path(relative, method="D") * unit
    return distances


def _choose_micro_batches(cost: CostModel, placement: Placement, blocks: tuple[int, ...]) -> tuple[Layout, str]:
    """Minimise equation (7) over the M of the grid that divide the batch and fit; return the layout and a note."""
    work, pp, dp = cost.work, len(placement[0]), len(placement)
    values: dict[int, float] = {}
    layouts: dict[int, Layout] = {}
    shortages: list[MemoryShortage] = []
    for count in GRID:
        size, remainder = divmod(work.sequences, count * dp)
        if remainder or size == 0 or (work.fixed is not None and work.fixed.micro_batch not in (None, size)):
            continue
        layout = Layout(placement, "1f1b", size, (count,) * dp, blocks, work.memory_options)
        excess = layout.memory_shortage(cost.memory)
        if excess is not None:
            shortages.append(excess)
            continue
        sends = [cost.send_s(a, b, size) for row in placement for a, b in pairwise(row)]
        step_s = fmean(cost.module_times(unit, size).whole_model(work.spec.layers) for unit in layout.units())
        values[count] = equation_7(pp, work.spec.layers, count, step_s, fmean(sends) if sends else 0.0)
        layouts[count] = layout
    if not values:
        raise _no_grid_point(work, dp, shortages)
    chosen = min(values, key=lambda count: (values[count], count))
    grid = ", ".join(f"M={count}: {value:.6g}" for count, value in values.items())
    return layouts[chosen], f"Equation (7) over M in {{2, 4, 8, 16}} chose M={chosen}; its values in seconds: {grid}."


def _no_grid_point(work: Workload, dp: int, shortages: Sequence[MemoryShortage]) -> InputError | RefusedError:
    if shortages:
        tightest = min(shortages, key=lambda excess: excess.ratio)
        return RefusedError(
            f"the model cannot fit with M of 2, 4, 8 or 16: {tightest}; use `--solver auto`, "
            "more or larger devices, or a smaller model"
        )
    return InputError(
        f"batch.global: found {work.sequences}; with dp {dp} the paper's rule needs a multiple of {2 * dp} (M is 2, 4, "
        "8 or 16); change it, or use `--solver auto`"
    )
