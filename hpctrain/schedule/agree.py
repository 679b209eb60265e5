"""Checks that replicas that share a state run its collectives in the same order.

In different orders, replicas would wait for each other for ever, or exchange the wrong tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Action
from hpctrain.schedule.resolve import schedule_of


def check_collective_order(plan: Plan) -> None:
    """Check that the action tables of all replicas agree on the collectives that the plan's sharding needs.

    Raises:
        InputError: the tables of a pipeline rank differ between replicas, or `schedule_of` raises it.
    """
    tables = [schedule_of(plan, replica)[0] for replica in range(plan.dp)]
    if plan.shards == 1:
        return
    for replica, table in enumerate(tables):
        for rank, row in enumerate(table.ranks):
            order, reference = collectives(row, plan.zero), collectives(tables[0].ranks[rank], plan.zero)
            if order != reference:
                raise InputError(
                    f"plan: actions[{replica}][{rank}]: with zero {plan.zero} replicas {_SYNCHRONISES[plan.zero]}, so "
                    f"all come to that in the same order; found {_first_difference(order, reference)} in replica 0; "
                    "give the replicas the same order of actions, or use zero 0"
                )


_SYNCHRONISES = {
    1: "sum a stage's gradients after its last backward",
    2: "sum gradients in every backward",
    3: "gather weights in every action and sum gradients in every backward",
}


def collectives(row: Sequence[Action], zero: int) -> list[str]:
    """Return the collectives that a pipeline rank runs with other replicas, in order.

    Args:
        row: the actions of the pipeline rank.
        zero: ZeRO level. At level 1 there is a collective after each stage's last backward, at level 2 after each
            backward that yields gradients of weights, at level 3 for each action. B and W count as different
            collectives: B goes through a stage from its last block to its first, W sums all blocks at the end.
    """
    if zero == 3:
        return [f"{action.stage}{action.kind}" for action in row]
    yielding = [action for action in row if action.kind in "BW"]
    if zero == 2:
        return [f"{action.stage}{action.kind}" for action in yielding]
    last = {action.stage: index for index, action in enumerate(yielding)}
    return [f"stage {stage}" for stage in sorted(last, key=last.__getitem__)]


def _first_difference(order: list[str], other: list[str]) -> str:
    for index, (collective, expected) in enumerate(zip(order, other, strict=False)):
        if collective != expected:
            return f"{collective} as number {index + 1}, where it is {expected}"
    return f"{len(order)} of them, where there are {len(other)}"
