"""Action tables as torch's schedule executor takes them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from hpctrain.parallel.mesh import Coordinate
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Schedule

ActionTable = dict[int, list[_Action]]
"""Rank in the pipeline's process group -> its actions, including sends and receives."""


def actions_by_group_rank(
    plan: Plan, schedule: Schedule, mesh: DeviceMesh, coordinate: Coordinate
) -> dict[int, list[_Action | None]]:
    """Return rank in the pipeline's process group -> the rank's actions as torch's objects, in order; no entry is None.

    torch orders the members of a process group by global rank, so a rank in the group may differ from the pipeline
    rank.
    """
    column = [pp_row[coordinate.dp] for pp_row in plan.mesh()]
    actions: dict[int, list[_Action | None]] = {}
    for pp, row in enumerate(schedule.ranks):
        member = sorted(column[pp])[coordinate.tp]
        actions[dist.get_group_rank(mesh.get_group("pp"), member)] = [_Action.from_str(str(action)) for action in row]
    return actions


def place_unshards(runtime: _PipelineScheduleRuntime, zero: int, held: list[int]) -> None:
    """Replace torch's choice of when the weights of whole stages are gathered and freed.

    torch keeps up to three stages of a rank gathered, in the order of the action table. Replicas with different tables
    would then wait for each other. With this function, all stages are gathered at the start and freed at the end at
    ZeRO levels 1 and 2. At level 3 the table gathers none: each stage gathers its weights within its passes
    (`ShardedStage`).

    Args:
        runtime: torch's schedule executor; its action table is changed.
        zero: ZeRO level.
        held: numbers of this rank's stages.
    """
    order = runtime.pipeline_order_with_comms
    for rank, row in order.items():
        moved = (_ComputationType.UNSHARD, _ComputationType.RESHARD)
        actions = [action for action in row if action.computation_type not in moved]
        if zero < 3:
            indices = sorted({action.stage_index for action in row})
            gather, free = ([_Action(index, kind, None) for index in indices] for kind in moved)
            actions = [*gather, *actions, *free]
        order[rank] = actions
    if zero == 3:
        runtime.unsharded_stages.update(held)


def forward_only(order: ActionTable) -> ActionTable:
    """Return the action table without backward actions and their messages.

    torch adds sends and receives to a table by simulating it, each send next to its receive. Only whole pairs are
    removed, which keeps the simulation valid, so the remaining table cannot deadlock either.
    """
    kinds = _ComputationType
    kinds_to_run = (kinds.UNSHARD, kinds.FORWARD, kinds.SEND_F, kinds.RECV_F, kinds.RESHARD)
    return {rank: [action for action in row if action.computation_type in kinds_to_run] for rank, row in order.items()}
