"""Where a rank asks for the messages of other ranks in its table of actions."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from hpctrain.parallel.action_table import ActionTable, early_receives, forward_only, micro_batches_in_flight
from hpctrain.records.plan.schedule import Schedule
from hpctrain.schedule.generate import make_schedule

KIND = _ComputationType
RECEIVES = (KIND.RECV_F, KIND.RECV_B)
SENDER = {KIND.RECV_F: (-1, KIND.SEND_F), KIND.RECV_B: (1, KIND.SEND_B)}
"""Receive -> (stage of its sender minus its own stage, send)."""
NEEDED = {KIND.FORWARD: KIND.RECV_F, KIND.FULL_BACKWARD: KIND.RECV_B, KIND.BACKWARD_INPUT: KIND.RECV_B}
"""Computation -> receive of the message that it uses."""
CASES = [
    ("gpipe", 2, 2, 4),
    ("1f1b", 3, 3, 5),
    ("interleaved_1f1b", 2, 4, 4),
    ("interleaved_zero_bubble", 4, 8, 10),
    ("zbv", 2, 4, 6),
]
"""(name, pipeline ranks, stages, micro-batches)."""


def torch_table(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[ActionTable, list[int], Schedule]:
    """The table of a schedule with torch's sends and receives, the rank of each stage, and the schedule."""
    schedule = make_schedule(name, ranks, stages, micro_batches)
    owner = {action.stage: rank for rank, row in enumerate(schedule.ranks) for action in row}
    actions = {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.ranks)}
    return _add_send_recv(actions, owner.__getitem__, stages), [owner[stage] for stage in range(stages)], schedule


def run(table: ActionTable, owner: list[int], limits: dict[tuple[int, KIND], int]) -> None:
    """Run the rows as gloo does at its slowest: a message arrives only once its receiver has asked for it, messages
    between two ranks arrive in order, and a stage that has as many sends of a kind on their way as its limit waits.
    Fails if no rank can go on."""
    rows = {rank: deque(row) for rank, row in table.items()}
    asked: dict[tuple[int, int], list[_Action]] = {}
    sent: dict[tuple[int, int], list[_Action]] = {}
    done: dict[_Action, tuple[int, int, int]] = {}
    while any(rows.values()):
        moved = False
        for rank, row in rows.items():
            while row:
                action = row[0]
                stage, kind, micro_batch = action[:3]
                if kind in SENDER:
                    step, send = SENDER[kind]
                    asked.setdefault((owner[stage + step], rank), []).append(_Action(stage + step, send, micro_batch))
                elif kind in (KIND.SEND_F, KIND.SEND_B):
                    receiver = owner[stage + (1 if kind == KIND.SEND_F else -1)]
                    mine = [at for at, place in done.items() if at[:2] == (stage, kind)]
                    late = mine[-limits[stage, kind]] if len(mine) >= limits[stage, kind] else None
                    if late is not None and len(asked.get(done[late][:2], [])) <= done[late][2]:
                        break
                    pair = rank, receiver
                    done[action] = (*pair, len(sent.setdefault(pair, [])))
                    sent[pair].append(action)
                elif kind in NEEDED:
                    step, send = SENDER[NEEDED[kind]]
                    message = _Action(stage + step, send, micro_batch)
                    last = stage + step in (-1, len(owner))
                    if not last and owner[stage + step] != rank and message not in done:
                        break
                row.popleft()
                moved = True
        assert moved, f"every rank waits: {[row[0] for row in rows.values() if row]}"
    # gloo gives the first message between two ranks to the first receive.
    assert asked == sent
    assert asked


def check(name: str, ranks: int, stages: int, micro_batches: int) -> None:
    table, owner, schedule = torch_table(name, ranks, stages, micro_batches)
    most = micro_batches_in_flight(schedule)
    limits = {(stage, KIND.SEND_F): most[stage] for stage in most}
    limits |= {(stage, KIND.SEND_B): most.get(stage - 1, 1) for stage in most}
    early = early_receives(table)
    for order in (early, forward_only(early)):
        run(order, owner, limits)
    for rank, row in early.items():
        others = [action for action in row if action.computation_type not in RECEIVES]
        assert others == [action for action in table[rank] if action.computation_type not in RECEIVES]
        waiting: dict[tuple[int, KIND], set[int]] = {}
        for action in row:
            stage, kind, micro_batch = action[:3]
            if kind in RECEIVES:
                asked = waiting.setdefault((stage, kind), set())
                asked.add(micro_batch)
                assert len(asked) <= most[stage - 1 if kind == KIND.RECV_F else stage]
            elif kind in NEEDED:
                waiting.get((stage, NEEDED[kind]), set()).discard(micro_batch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]} ranks")
def test_a_bounded_number_of_receives_waits(case: tuple[str, int, int, int]) -> None:
    check(*case)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_receives_of_any_size_of_pipeline(name: str, ranks: int, chunks: int, rounds: int) -> None:
    chunks = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": chunks + 1, "interleaved_zero_bubble": chunks + 1, "zbv": 2}[
        name
    ]
    check(name, ranks, ranks * chunks, max(2 * ranks, ranks * rounds))


def test_with_1f1b_the_receives_that_wait_do_not_depend_on_the_micro_batches() -> None:
    table, _, schedule = torch_table("1f1b", 2, 2, 4)
    assert micro_batches_in_flight(schedule) == {0: 2, 1: 1}
    first, last = (" ".join(str(action) for action in row) for row in early_receives(table).values())
    # The gradient is asked for before its activation, and the next activation before the gradient that it waits for.
    assert first == (
        "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0F2 0RECV_B2 0SEND_F2 0B1 0F3 0RECV_B3 0SEND_F3 0B2 0B3"
    )
    assert last == (
        "1RECV_F0 1RECV_F1 1F0 1B0 1RECV_F2 1SEND_B0 1F1 1B1 1RECV_F3 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3"
    )
    assert micro_batches_in_flight(torch_table("1f1b", 2, 2, 48)[2]) == {0: 2, 1: 1}
