"""Solvers: each returns the best plan of a space, or raises an error that says why there is none.

The solver `paper` exists to reproduce the paper: equation (1) by greedy co-location; boundaries between stages every 4
to 6 blocks of a deep model, with the number of stages that equation (6) balances best; equation (7) by a grid over the
micro-batch count M. Equation (7) as printed has no bubble and no cost per micro-batch, so it tends to the smallest M.
The default solver is `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.even_parts import even_parts
from hpctrain.base.units import format_count
from hpctrain.planner.bounds.closed_form import ideal_step_s
from hpctrain.planner.cost.memory_options import DEFAULT_MEMORY_OPTIONS, MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.pool import DevicePool
from hpctrain.planner.devices.tensor_parallel_group import (
    Placement,
    TensorParallelGroup,
    nearest_chain,
)
from hpctrain.planner.layout.layout import Layout, MemoryShortage
from hpctrain.planner.search.exact import exhaustive_search
from hpctrain.planner.search.many_devices import refined, search_pool
from hpctrain.planner.search.neighbours import WHY_NO_SHARDING, shortage
from hpctrain.planner.search.space import SearchSpace
from hpctrain.planner.search.state import ChosenPlan
from hpctrain.planner.simulate.predict import Prediction, largest_increase, predict
from hpctrain.records.plan.plan import ParallelDims, ZeroLevel
from hpctrain.records.plan.prediction import Rejected

Solver = Literal["auto", "exact", "paper"]


def solve(space: SearchSpace, solver: Solver) -> ChosenPlan:
    """Return the plan that the solver finds in a space, with rejected neighbours and notes. If the run file fixes no
    degrees, the solvers auto and exact compare all memory options.

    Args:
        solver: 'auto' searches for the fastest plan by the cost model; 'exact' tries every plan on a few devices;
            'paper' follows the paper's rules.

    Raises:
        RefusedError: no plan fits even with memory options, or there are too few devices for the given degrees.
        InputError: no layout is possible with the given degrees and batch; there are too many devices or cuts for the
            solver exact; or the rules of the solver paper do not allow the batch or the placement.
    """
    if not space.candidate_dims:
        raise _no_feasible_dims(space)
    if solver == "paper":
        return solve_as_paper(space)
    result = refined(exhaustive_search(space)) if solver == "exact" else search_pool(space)
    if result.best is None:
        raise _nothing_fits(_leanest(space))
    winner = result.space
    notes: list[str] = []
    rejected: list[Rejected] = []
    if not winner.pool_placements.complete:
        notes.append("There were too many orders of devices to try all; the likely ones were tried.")
    if not result.ended:
        notes.append("Options that could be faster by the bound were left when many others had not been.")
    best = result.best
    if winner is not space:
        without = _without_memory_options(space, best)
        why = "Chosen to save memory" if without.delta_s is None else "Chosen because the step is shorter"
        notes.insert(0, f"{why}: {best.layout.memory_options}.")
        rejected.append(without)
    return ChosenPlan(winner, best, rejected, notes, min(result.bound_s, best.total))


def _leanest(plain: SearchSpace) -> SearchSpace:
    """Return the space with the memory options that need the least memory among those with which some degrees can run;
    `plain` itself if the run file gives the degrees, or if no degrees can run.

    Args:
        plain: the space with the memory options of the run file.
    """
    if plain.work.fixed is not None:
        return plain
    levels: tuple[ZeroLevel, ...] = get_args(ZeroLevel)[::-1] if plain.work.may_shard_gradients else (0,)
    lean = (plain.with_work(memory_options=MemoryOptions(zero=zero, recompute="full")) for zero in levels)
    return next((space for space in lean if space.candidate_dims), plain)


def _without_memory_options(plain: SearchSpace, best: Prediction) -> Rejected:
    """Return the rejected neighbour that has the best plan's degrees, schedule and micro-batch size on the same devices
    and the memory options of the run file, with the reason why it does not fit or by how much it is slower.
    """
    change, dims = "zero 0 and recompute none", best.layout.dims
    if best.layout.memory_options.sequence_parallel:
        change = "zero 0, recompute none and no sequence parallelism"
    layout = plain.fit_layout(best.layout.placement, best.layout.option)
    lack = layout.memory_shortage(plain.cost.memory)
    if lack is not None:
        return Rejected(change=change, reason=f"with {dims}, {lack}")
    other = predict(plain.cost, layout, whole=True)
    return Rejected(
        change=change,
        delta_s=max(0.0, other.total - best.total),
        reason=f"with {dims}, {largest_increase(best.terms, other.terms)}",
    )


def _no_feasible_dims(space: SearchSpace) -> HpctrainError:
    """Return the error for impossible degrees.

    It is a RefusedError if there are too few devices, an InputError if the model does not allow the degrees.
    """
    dims, reason = next(iter(space.impossible.items()))
    text = f"parallel: found {dims}; {reason}"
    if math.prod(dims) > len(space.pool.devices):
        idle = [f" {note}" for note in space.pool.notes if note.startswith(("Left out", "Kept idle"))]
        return RefusedError(f"{text}; lower a degree or add nodes{'.' * bool(idle)}{''.join(idle)}")
    return InputError(f"{text}; lower a degree, or use parallel.mode auto")


def _nothing_fits(space: SearchSpace) -> HpctrainError:
    """Return the error for a space in which no plan fits.

    It names the degrees that lack the least memory, or another reason if no memory is lacking.
    """
    work = space.work
    lacks = [(dims, shortage(space, dims)) for dims in space.candidate_dims]
    short = [(dims, lack) for dims, lack in lacks if isinstance(lack, MemoryShortage)]
    if not short:
        reason = next(lack for _, lack in lacks if isinstance(lack, str))
        change = "; change batch.global, a degree, parallel.micro_batch or parallel.schedule"
        return InputError(f"parallel: {reason}{change * (reason != WHY_NO_SHARDING)}")
    dims, excess = min(short, key=lambda item: (item[1].ratio, item[0]))
    how = f" and {work.memory_options}" if work.memory_options != DEFAULT_MEMORY_OPTIONS else ""
    return RefusedError(
        f"the model ({format_count(work.spec.parameters())} parameters) cannot fit: with {dims}{how}, "
        f"the nearest to fitting, {excess}; use more or larger devices, a smaller model or "
        "data.seq_len"
        + (", or compression.mode bf16, which keeps nothing" if work.codec.has_state else "")
        + (", or parallel.mode auto" if work.fixed is not None else "")
    )


SEAM_LAYERS = (4, 6)
"""Fewest and most blocks of a stage of a deep model (the paper, section 3.2)."""
GRID = (2, 4, 8, 16)
"""Micro-batch counts M over which equation (7) is minimised (the paper, section 3.4)."""


def solve_as_paper(space: SearchSpace) -> ChosenPlan:
    """Return the plan by those rules of the paper that hpctrain implements.

    Unless the run file fixes the degrees or the model cannot be cut, each stage has a node of its own, which holds the
    tensor-parallel groups of all replicas of the stage. With G stages and R replicas there are P = G·R groups.

    Raises:
        InputError: no micro-batch count M in `GRID` divides the batch, or the run asks for ZeRO on a placement that
            cannot shard the training state.
        RefusedError: no M in `GRID` fits the memory, or there are too few devices for the degrees.
    """
    made, errors = list[_PaperLayout](), list[HpctrainError]()
    for group in _degrees(space.pool, space.work):
        for dims in group:
            try:
                made.append(_paper_layout(space, dims))
            except (InputError, RefusedError) as error:
                errors.append(error)
        if made:
            break
    if not made:
        raise errors[-1]
    chosen = min(made, key=lambda option: option.imbalance_s)
    if not space.can_shard(chosen.layout.placement):
        raise InputError(f"parallel: {WHY_NO_SHARDING}")
    notes = [chosen.note, chosen.micro_batch_note]
    if len(made) > 1:
        compared = ", ".join(f"pp {option.layout.pp}: {option.imbalance_s:.6g}" for option in made)
        notes.append(
            f"Boundaries every {SEAM_LAYERS[0]} to {SEAM_LAYERS[1]} blocks; equation (6), the difference of its sides "
            f"in seconds as mean over stages, chose pp {chosen.layout.pp}: {compared}."
        )
    return ChosenPlan(
        space, predict(space.cost, chosen.layout), [], notes, ideal_step_s(space.pool, space.work)
    )  # fmt: skip


class _PaperLayout(NamedTuple):
    """A layout by the paper's rules for some degrees."""

    layout: Layout
    imbalance_s: float
    """How far equation (6) is from holding, as mean over the stages."""
    note: str
    """About equation (1)."""
    micro_batch_note: str
    """About equation (7)."""


def _paper_layout(space: SearchSpace, dims: ParallelDims) -> _PaperLayout:
    """Return the layout with these degrees; the errors are those of `solve_as_paper`."""
    cost, work, (pp, dp, tp) = space.cost, space.work, dims
    stages = _stage_units(space, pp, dp, tp)
    distance = _distances(cost, [unit for row in stages for unit in row])
    # [stage, stage] -> the largest distance of any replica
    between = distance.reshape(len(stages), dp, len(stages), dp).diagonal(axis1=1, axis2=3).max(axis=2)
    order, objective = greedy_colocation(between, pp, float(work.stage_boundary_bytes(1)))
    placement = Placement(tuple(stages[index][replica] for index in order) for replica in range(dp))
    layout, text = _choose_micro_batches(cost, placement, even_parts(work.spec.layers, pp))
    note = (
        f"Solved by the paper's rules: equation (1), greedy co-location on shortest paths with edge weight 1/b, has "
        f"the objective {objective:.6g} s per sequence at pp {pp}; blocks are cut evenly."
    )
    return _PaperLayout(layout, _imbalance_s(cost, layout), note, text)


def equation_6(compute_s: float, communication_s: float, bubble_s: float) -> float:
    """Return by how many seconds the sides of equation (6) of the paper differ for a stage: T_comp ≈ T_comm + T_bubble.

    Args:
        compute_s: seconds of the stage's forward and backward passes in a step.
        communication_s: seconds of its messages in a step.
        bubble_s: seconds in which its devices are idle in a step.
    """
    return abs(compute_s - communication_s - bubble_s)


def _imbalance_s(cost: CostModel, layout: Layout) -> float:
    """Return the mean of equation (6) over the stages of the first replica, with evenly cut blocks: a stage sends an
    activation and a gradient for each micro-batch, and its bubble is that of 1F1B."""
    row, count, size = layout.placement[0], layout.micro_batches[0], layout.micro_batch
    sends = [cost.send_s(a, b, size) for a, b in pairwise(row)] + [0.0]
    passes = [cost.module_times(unit, size).whole_model(cost.work.spec.layers) / len(row) for unit in row]
    return fmean(
        equation_6(count * seconds, 2 * count * send, (len(row) - 1) * seconds)
        for seconds, send in zip(passes, sends, strict=True)
    )


def greedy_colocation(distance: NDArray[np.float64], count: int, message_bytes: float) -> tuple[list[int], float]:
    """Solve equation (1) of the paper greedily: choose and order `count` candidates for stages, for a small sum of
    c·d(candidate, next candidate).

    Each candidate is tried as the first one; the best order wins.

    Args:
        distance: [candidate, candidate], shortest-path distances d in seconds per byte.
        message_bytes: c, bytes of a stage message; equal at all boundaries.

    Returns:
        The numbers of the candidates in order, and the objective in seconds.
    """

    def chain(start: int) -> list[int]:
        others = [place for place in range(len(distance)) if place != start]
        return nearest_chain([start, *others], lambda a, b: float(distance[a, b]))[:count]

    def objective(order: list[int]) -> float:
        return message_bytes * sum(float(distance[a, b]) for a, b in pairwise(order))

    best = min(map(chain, range(len(distance))), key=objective)
    return best, objective(best)


def equation_7(stages: int, layers: int, micro_batches: int, step_s: float, send_s: float) -> float:
    """Return equation (7) of the paper as printed, in seconds: G/L · M·T_step + (M − 1)·T_comm.

    G is `stages`, L `layers`, M `micro_batches`, T_step `step_s` and T_comm `send_s`.

    Args:
        step_s: seconds of the whole model for one micro-batch.
        send_s: seconds of a stage message.
    """
    return stages / layers * micro_batches * step_s + (micro_batches - 1) * send_s


def _degrees(pool: DevicePool, work: Workload) -> list[list[ParallelDims]]:
    """Return the degrees that the paper's rules allow, in groups; a later group counts if nothing in those before it is
    possible. There is one group with the degrees of the run file, if it fixes them. If not, the first group has each
    number of stages with which stages have 4 to 6 blocks, and the second group as many stages as there are nodes.
    """
    if work.fixed is not None:
        return [[ParallelDims(work.fixed.pp, work.fixed.dp, work.fixed.tp)]]
    nodes = pool.by_node()
    devices = min(len(devices) for devices in nodes.values())
    tp = max(tp for tp in range(1, devices + 1) if devices % tp == 0 and work.spec.tensor_parallel_error(tp) is None)
    if work.spec.pipeline_error(2) is not None:
        return [[ParallelDims(1, len(nodes) * devices // tp, tp)]]
    (least, most), layers = SEAM_LAYERS, work.spec.layers
    at_seams = [pp for pp in range(2, len(nodes) + 1) if least * pp <= layers <= most * pp]
    return [[ParallelDims(pp, devices // tp, tp) for pp in group] for group in (at_seams, [min(len(nodes), layers)])]


def _stage_units(space: SearchSpace, pp: int, dp: int, tp: int) -> list[list[TensorParallelGroup]]:
    """Return candidates for a stage, at least `pp` of them, each with `dp` tensor-parallel groups. The groups of a
    candidate are on one node, or across nodes if fewer than `pp` candidates fit within nodes.

    Raises:
        RefusedError: there are fewer than `pp` candidates.
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
    """Return [group, group] -> shortest-path distance between tensor-parallel groups in seconds per byte.

    A link of bandwidth b is an edge of length 1/b.
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
    """Return the layout with the number of micro-batches M that minimises equation (7) of the paper, and a note with
    the equation's value in seconds for each M that was tried.

    Only those M in `GRID` are tried that divide each replica's sequences of the global batch and fit the memory.

    Raises:
        InputError: no M in `GRID` divides a replica's sequences.
        RefusedError: no M in `GRID` fits the memory.
    """
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
