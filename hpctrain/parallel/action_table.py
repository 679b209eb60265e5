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


def receives_first(order: ActionTable) -> ActionTable:
    """Return the action table with the receives of each rank before its other actions, in the same order.

    gloo sends a message only after the receiver has asked for it, and the request waits behind the data that the
    receiver itself sends on the same connection. torch puts a receive next to its send, which may be behind other sends
    of the receiver; over a slow link the request then takes as long as these. A request before all sends waits for
    nothing. gloo matches messages between two ranks by their order, which stays the same. torch's stages have a buffer
    for each micro-batch, so early receives need no further memory, except for compressed messages.

    This is for gloo alone: NCCL runs the messages between two ranks one after the other, so two ranks that both receive
    first would wait for each other for ever.
    """
    kinds = (_ComputationType.RECV_F, _ComputationType.RECV_B)
    return {rank: sorted(row, key=lambda action: action.computation_type not in kinds) for rank, row in order.items()}


def forward_only(order: ActionTable) -> ActionTable:
    """Return the action table without backward actions and their messages.

    torch adds sends and receives to a table by simulating it, each send next to its receive. Only whole pairs are
    removed, which keeps the simulation valid, so the remaining table cannot deadlock either.
    """
    kinds = _ComputationType
    kinds_to_run = (kinds.UNSHARD, kinds.FORWARD, kinds.SEND_F, kinds.RECV_F, kinds.RESHARD)
    return {rank: [action for action in row if action.computation_type in kinds_to_run] for rank, row in order.items()}
