"""Where a rank asks for the messages of other ranks in its table of actions."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from hpctrain.parallel.action_table import ActionTable, forward_only, receives_first
from hpctrain.schedule.generate import make_schedule

RECEIVES = (_ComputationType.RECV_F, _ComputationType.RECV_B)
SENDER = {_ComputationType.RECV_F: (-1, _ComputationType.SEND_F), _ComputationType.RECV_B: (1, _ComputationType.SEND_B)}
"""Receive -> (stage of its sender minus its own stage, send)."""
CASES = [
    ("gpipe", 2, 2, 4),
    ("1f1b", 3, 3, 5),
    ("interleaved_1f1b", 2, 4, 4),
    ("interleaved_zero_bubble", 4, 8, 10),
    ("zbv", 2, 4, 6),
]
"""(name, pipeline ranks, stages, micro-batches)."""


def torch_table(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[ActionTable, list[int]]:
    """The table of a schedule with torch's sends and receives, and the rank of each stage."""
    schedule = make_schedule(name, ranks, stages, micro_batches)
    owner = {action.stage: rank for rank, row in enumerate(schedule.ranks) for action in row}
    actions = {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.ranks)}
    return _add_send_recv(actions, owner.__getitem__, stages), [owner[stage] for stage in range(stages)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]} ranks")
def test_a_rank_asks_for_all_messages_before_it_sends(case: tuple[str, int, int, int]) -> None:
    table, owner = torch_table(*case)
    for order in (table, forward_only(table)):
        early = receives_first(order)
        received: dict[tuple[int, int], list[_Action]] = {}
        sent: dict[tuple[int, int], list[_Action]] = {}
        for rank, row in early.items():
            receives = [action for action in row if action.computation_type in RECEIVES]
            others = [action for action in order[rank] if action.computation_type not in RECEIVES]
            assert row == receives + others
            for action in receives:
                step, send = SENDER[action.computation_type]
                stage = action.stage_index + step
                received.setdefault((owner[stage], rank), []).append(_Action(stage, send, action.microbatch_index))
            for action in others:
                for step, send in SENDER.values():
                    if action.computation_type == send:
                        sent.setdefault((rank, owner[action.stage_index - step]), []).append(action)
        # gloo gives the first message between two ranks to the first receive.
        assert received == sent
        assert received
