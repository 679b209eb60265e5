"""Action tables as torch's schedule executor takes them."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from hpctrain.parallel.mesh import Coordinate
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Schedule

ActionTable = dict[int, list[_Action]]
"""Rank in the pipeline's process group -> its actions, including sends and receives."""
_Kind = _ComputationType
_SEND_FOR = {
    _Kind.FORWARD: (_Kind.SEND_F, -1),
    _Kind.FULL_BACKWARD: (_Kind.SEND_B, 1),
    _Kind.BACKWARD_INPUT: (_Kind.SEND_B, 1),
}
"""Computation -> (send of the message that it needs, number of the sending stage minus that of its own)."""
_RECEIVE_OF = {_Kind.SEND_F: (_Kind.RECV_F, 1), _Kind.SEND_B: (_Kind.RECV_B, -1)}
"""Send -> (receive of its message, number of the receiving stage minus that of the sending one)."""


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


def early_receives(order: ActionTable) -> ActionTable:
    """Return the action table with the receives at places where their requests delay no message, and not before.

    gloo sends a message only after the receiver has asked for it, and the request waits behind the data that the
    receiver itself sends on the same connection. torch puts a receive next to its send, which may be behind other sends
    of the receiver; over a slow link the request then takes as long as these. Here, a receive stands before the last
    send of the receiver whose message the sender uses before it sends; without such a send, at the start. With 1F1B on
    two ranks, this is before the activation whose gradient is received, and before the gradient that the sender of an
    activation waits for. A stage thus has no more receives without a use than there are micro-batches in flight, in
    this stage for gradients, in the stage before for inputs (`micro_batches_in_flight`).

    gloo matches messages between two ranks by their order, which stays the same. Each rank asks for a message before
    the sender can send it, so a rank may also wait for its own sends. This is for gloo alone: NCCL runs the messages
    between two ranks one after the other, so two ranks that both receive first would wait for each other for ever.
    """
    owner = {action.stage_index: rank for rank, row in order.items() for action in row}
    receives = [receive for receive, _ in _RECEIVE_OF.values()]
    rows = {rank: [action for action in row if action.computation_type not in receives] for rank, row in order.items()}
    sends = {action: place for row in rows.values() for place, action in enumerate(row)}
    before: dict[int, dict[int, list[_Action]]] = {rank: defaultdict(list) for rank in rows}
    for row in rows.values():
        used: dict[int, int] = {}  # other rank -> place in its row of the last send whose message was used up to here
        for action in row:
            stage, kind, micro_batch = action[:3]
            if kind in _RECEIVE_OF:
                receive, step = _RECEIVE_OF[kind]
                receiver = owner[stage + step]
                before[receiver][used.get(receiver, 0)].append(_Action(stage + step, receive, micro_batch))
            elif kind in _SEND_FOR:
                send, step = _SEND_FOR[kind]
                message = _Action(stage + step, send, micro_batch)
                if message in sends:
                    sender = owner[message.stage_index]
                    used[sender] = max(used.get(sender, 0), sends[message])
    return {
        rank: [item for place, action in enumerate(row) for item in (*before[rank][place], action)]
        for rank, row in rows.items()
    }


def micro_batches_in_flight(schedule: Schedule) -> dict[int, int]:
    """Return stage -> the most micro-batches that are between the stage's forward and its backward pass (for inputs,
    if it is split) at one moment."""
    live: Counter[int] = Counter()
    most: dict[int, int] = {}
    for action in (action for row in schedule.ranks for action in row):
        live[action.stage] += {"F": 1, "W": 0}.get(action.kind, -1)
        most[action.stage] = max(most.get(action.stage, 0), live[action.stage])
    return most


def forward_only(order: ActionTable) -> ActionTable:
    """Return the action table without backward actions and their messages.

    torch adds sends and receives to a table by simulating it, each send next to its receive. Only whole pairs are
    removed, which keeps the simulation valid, so the remaining table cannot deadlock either.
    """
    kinds = _ComputationType
    kinds_to_run = (kinds.UNSHARD, kinds.FORWARD, kinds.SEND_F, kinds.RECV_F, kinds.RESHARD)
    return {rank: [action for action in row if action.computation_type in kinds_to_run] for rank, row in order.items()}
