"""Replicas that share a state come to its collectives in the same order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.resolve import check_collective_order, collectives

FORWARDS = ["0F0", "1F0", "0F1", "1F1"]
TABLES = {
    "stage after stage": [*FORWARDS, "1B0", "1B1", "0B0", "0B1"],
    "batch after batch": [*FORWARDS, "1B0", "0B0", "1B1", "0B1"],
    "one at a time": ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"],
    "weights of 1 last": [*FORWARDS, "1B0", "0B0", "1I1", "0B1", "1W1"],
    "weights of 0 last": [*FORWARDS, "1B0", "0B0", "1I1", "1W1", "0B1"],
}


def plan_of(zero: int, first: str, second: str, dp: int = 2, **fields: object) -> Plan:
    """One pipeline rank with two stages in each replica; the first half of the replicas runs the first table."""
    places = [f"local{index}:cpu0" for index in range(dp)]
    names = [first] * (dp // 2) + [second] * (dp - dp // 2)
    return Plan(
        pp=1, dp=dp, tp=1, zero=zero, schedule="custom", stages=[Stage(layers=(0, 1)), Stage(layers=(1, 2))],
        replicas=[Replica(sequences=2, micro_batch=1, micro_batches=2, devices=[[place], [place]]) for place in places],
        ranks=places, actions={index: {0: TABLES[name]} for index, name in enumerate(names)}, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("zero", "first", "second"),
    [
        (0, "stage after stage", "weights of 1 last"),
        (1, "stage after stage", "one at a time"),
        (1, "batch after batch", "weights of 0 last"),
        (2, "batch after batch", "one at a time"),
        (3, "weights of 1 last", "weights of 1 last"),
    ],
)
def test_orders_that_go_together(zero: int, first: str, second: str) -> None:
    check_collective_order(plan_of(zero, first, second))


@pytest.mark.parametrize(
    ("zero", "first", "second", "found"),
    [
        (1, "weights of 0 last", "weights of 1 last", "found stage 0 as number 1, where it is stage 1"),
        (2, "stage after stage", "batch after batch", "found 0B as number 2, where it is 1B"),
        (2, "batch after batch", "weights of 0 last", "found 1W as number 3, where it is 1B"),
        (3, "batch after batch", "one at a time", "found 1B as number 3, where it is 0F"),
        (3, "weights of 1 last", "weights of 0 last", "found 1W as number 8, where it is 0B"),
    ],
)
def test_orders_that_would_wait_for_ever_are_refused(zero: int, first: str, second: str, found: str) -> None:
    with pytest.raises(InputError, match=rf"plan: actions\[1\]\[0\]: with zero {zero} .*; {found} in replica 0; give"):
        check_collective_order(plan_of(zero, first, second))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_level_1_takes_any_numbers_of_micro_batches(pp: int, chunks: int, one: int, other: int) -> None:
    """Each stage ends after all that come behind it, whatever the number of micro-batches."""
    names = ["gpipe", "1f1b"] if chunks == 1 else ["interleaved_1f1b"]
    for name in names:
        first, second = (make_schedule(name, pp, pp * chunks, count) for count in (one, other))
        for rank in range(pp):
            expected = [f"stage {chunk * pp + rank}" for chunk in reversed(range(chunks))]
            assert collectives(first.ranks[rank], 1) == collectives(second.ranks[rank], 1) == expected


def test_copies_of_a_state_take_part_too() -> None:
    with pytest.raises(InputError, match=r"actions\[2\]\[0\]"):
        check_collective_order(plan_of(2, "stage after stage", "batch after batch", dp=4, shard=2))


def test_a_plan_that_shards_nothing_needs_no_agreement() -> None:
    check_collective_order(plan_of(3, "batch after batch", "one at a time", shard=1))
