"""`hpctrain bench plan --placement`: the gain from knowing devices and links, by the planner's own cost model.

The planner's plan for each case is compared with the same degrees and schedule as a launcher that does not know devices
and links would place them: ranks in the order of the nodes, tensor parallel within data parallel within pipeline
parallel (Megatron-LM, Narayanan et al. 2021, section 3), equal stages, equal shares of the batch, and micro-batches as
large as memory allows. It is the ablation "no placement" of the paper's figure 2. Nothing is measured; all figures are
predictions.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.base.even_parts import even_parts
from hpctrain.bench.planner.search import CASES, MixedCase, SearchCase, scene_of_case
from hpctrain.bench.record import make_record
from hpctrain.planner import make_plan
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.plan_conversion import CostedLayout, layout_of_plan
from hpctrain.planner.simulate.predict import predict
from hpctrain.schedule.generate import why_no_schedule

PLACED = tuple(case for case in CASES if case.gpus == 32)
"""The cases with 32 GPUs: equal nodes, nodes of two kinds, and the paper's cluster, where some nodes hold GPUs of two
kinds."""

ORDERS = 20
"""Number of random orders of the nodes in each case; every run of the bench draws the same orders."""


@dataclass(frozen=True)
class PlacementRow:
    """Predicted seconds of a step in one case: with the planner's plan, with ranks in the listed order of the nodes,
    and with ranks in random orders (median, smallest and largest). `fitting` counts the random orders that fit into
    memory."""

    case: str
    plan: str
    """Degrees and schedule of the planner's plan."""
    planned_s: float
    """Step of the planner's plan."""
    listed_s: float | None
    """Step when ranks are placed in the topology file's order of nodes; None where the model does not fit into
    memory."""
    shuffled_s: tuple[float, float, float] | None
    """Step when ranks are placed in random orders of nodes: median, smallest and largest over the orders that fit into
    memory; None where no order fits."""
    fitting: int
    """Number of random orders that fit into memory."""


def measure(
    progress: Callable[[str], None], cases: Sequence[SearchCase | MixedCase] = PLACED, orders: int = ORDERS
) -> dict[str, Any]:
    """Plan every case, and predict the step time also with ranks in the listed order of the nodes and in `orders`
    random orders. Return the record of the bench."""
    rows = []
    for case in cases:
        progress(case.name)
        rows.append(_row(case, orders))
    return make_record("placement", rows, {"orders": orders})


def _row(case: SearchCase | MixedCase, orders: int) -> PlacementRow:
    run, topology = scene_of_case(case)
    spec = run.spec()
    plan = make_plan(run, spec, topology)
    scene = layout_of_plan(run, spec, plan, topology)
    used = set(plan.nodes)
    nodes = [node.id for node in topology.nodes if node.id in used]
    rng = random.Random(0)
    shuffled = [unplaced_s(scene, rng.sample(nodes, len(nodes))) for _ in range(orders)]
    fitting = [seconds for seconds in shuffled if seconds is not None]
    return PlacementRow(
        case=case.name,
        plan=f"{plan.dims}, {plan.schedule}",
        planned_s=predict(scene.cost, scene.layout).total,
        listed_s=unplaced_s(scene, nodes),
        shuffled_s=(statistics.median(fitting), min(fitting), max(fitting)) if fitting else None,
        fitting=len(fitting),
    )


def unplaced_s(scene: CostedLayout, nodes: Sequence[str]) -> float | None:
    """Return the predicted seconds of a step without placement, or None if the model does not fit into memory.

    The devices of the plan in `scene`, in the order of `nodes`, take the plan's ranks one after the other, with equal
    stages and equal shares of the batch. The micro-batch is the largest one that fits into memory and is at most the
    plan's.
    """
    layout = scene.layout
    devices = [device for unit in layout.units() for device in unit.devices]
    line = sorted(devices, key=lambda device: (nodes.index(device.node), device.device_id))
    dp, tp = layout.dp, layout.tp

    def unit_at(replica: int, rank: int) -> TensorParallelGroup:
        first = (rank * dp + replica) * tp
        return TensorParallelGroup(first, tuple(line[first : first + tp]))

    placement = Placement(tuple(unit_at(replica, rank) for rank in range(layout.pp)) for replica in range(dp))
    stages = len(layout.blocks)
    blocks = even_parts(sum(layout.blocks), stages)
    for size in sorted(scene.cost.work.micro_batch_sizes(), reverse=True):
        counts = even_parts(scene.cost.work.sequences // size, dp)
        if size > layout.micro_batch or why_no_schedule(layout.schedule, layout.pp, stages, counts[-1]):
            continue
        even = replace(layout, placement=placement, blocks=blocks, micro_batch=size, micro_batches=counts)
        if even.memory_shortage(scene.cost.memory) is None:
            return predict(scene.cost, even).total
    return None
