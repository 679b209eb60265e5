"""Finds the action table that a replica runs, and checks it: each action is in it once, on its stage's rank, and after
the actions whose results it needs.

The table is the one in the plan, if complete, else that of the named schedule. Replicas that share a state must run its
collectives in the same order: in different orders they would wait for each other for ever, or exchange the wrong
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpctrain.base.errors import InputError
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.schedule.generate import SCHEDULE_NAMES, make_schedule


def check_schedule(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Check that an action table is complete and can be executed.

    For each micro-batch a stage runs F once, and either B or both I and W. All actions of a stage lie on one rank. With
    stage s and micro-batch m, F(s, m) needs F(s-1, m). The backward for inputs (B or I) of (s, m) needs F(s, m) and the
    backward for inputs of (s+1, m). W(s, m) needs I(s, m).

    Raises:
        ValueError: the table breaks a rule; the message is one line about the first problem.
    """
    _check_range(schedule, stages, micro_batches)
    _check_whole(schedule, stages, micro_batches)
    _check_owners(schedule)
    execution_order(schedule, stages)


def _inputs_of(action: Action, stages: int) -> tuple[tuple[int, str, int], ...]:
    """Return the actions that an action waits for, as (stage, kind, micro-batch); the kind 'B' stands for B or I.

    Args:
        action: the action.
        stages: number of stages in all.
    """
    stage, kind, micro_batch = action
    if kind == "F":
        return ((stage - 1, "F", micro_batch),) if stage else ()
    if kind == "W":
        return ((stage, "I", micro_batch),)
    if stage + 1 == stages:
        return ((stage, "F", micro_batch),)
    return (stage, "F", micro_batch), (stage + 1, "B", micro_batch)


def _check_range(schedule: Schedule, stages: int, micro_batches: int) -> None:
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.stage >= stages:
                raise ValueError(f"pipeline rank {rank}: {action}: there are stages 0 to {stages - 1}")
            if action.micro_batch >= micro_batches:
                raise ValueError(f"pipeline rank {rank}: {action}: there are micro-batches 0 to {micro_batches - 1}")


def _check_whole(schedule: Schedule, stages: int, micro_batches: int) -> None:
    counts = Counter(action for row in schedule.ranks for action in row)
    for action, count in counts.items():
        if count > 1:
            raise ValueError(f"{action} stands {count} times in the table, allowed: once")
    for micro_batch in range(micro_batches):
        for stage in range(stages):
            kinds = {kind for kind in "FBIW" if Action(stage, kind, micro_batch) in counts}
            if "F" not in kinds:
                raise ValueError(f"{Action(stage, 'F', micro_batch)} is missing")
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                backward = [str(Action(stage, kind, micro_batch)) for kind in sorted(kinds - {"F"})]
                raise ValueError(
                    f"backward of stage {stage}, micro-batch {micro_batch}: found {', '.join(backward) or 'none'}, "
                    "allowed: B, or both I and W"
                )


def _check_owners(schedule: Schedule) -> None:
    owner: dict[int, int] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"{action} is on pipeline rank {rank}, but stage {action.stage} lies on rank {owner[action.stage]}"
                )


OrderedAction = tuple[int, Action, int]
"""An action in an order in which a table can be executed: its pipeline rank, the action, and the place in this order of
the action of another stage for which it waits; -1 if it waits for none."""


def execution_order(schedule: Schedule, stages: int) -> list[OrderedAction]:
    """Return the actions of a table, sorted so that each action comes after the actions that it waits for.

    Raises:
        ValueError: a rank would wait for ever, so that the table cannot be executed.
    """
    order: list[OrderedAction] = []
    number = 1 + max((action.micro_batch for row in schedule.ranks for action in row), default=-1)
    # [stage][micro-batch] -> place of the forward, of the B or I, and of the I alone; -1 while it is missing.
    forwards, backwards, inputs = ([[-1] * number for _ in range(stages)] for _ in range(3))
    position, before, last = [0] * len(schedule.ranks), -1, stages - 1
    while len(order) > before:
        before = len(order)
        for rank, row in enumerate(schedule.ranks):
            for action in row[position[rank] :]:
                stage, kind, index = action
                needs = -1
                if kind == "F":
                    if stage and (needs := forwards[stage - 1][index]) < 0:
                        break
                    forwards[stage][index] = len(order)
                elif kind == "W":
                    if inputs[stage][index] < 0:
                        break
                else:
                    if forwards[stage][index] < 0 or (stage < last and (needs := backwards[stage + 1][index]) < 0):
                        break
                    backwards[stage][index] = len(order)
                    if kind == "I":
                        inputs[stage][index] = len(order)
                order.append((rank, action, needs))
                position[rank] += 1
    for rank, row in enumerate(schedule.ranks):
        if position[rank] < len(row):
            action = row[position[rank]]
            done = {(stage, "B" if kind == "I" else kind, index) for _, (stage, kind, index), _ in order}
            missing = next(need for need in _inputs_of(action, stages) if need not in done)
            raise ValueError(
                f"pipeline rank {rank}: {action} waits for {Action(*missing)}, which never comes before it; "
                "the table cannot be executed"
            )
    return order


def schedule_of(plan: Plan, replica: int) -> tuple[Schedule, str | None]:
    """Return the action table of a replica, and a note for the user if the table in the plan could not be used, else
    None.

    If you edit micro-batches or stages by hand, you need not rewrite the table of a named schedule: hpctrain makes it
    again.

    Raises:
        InputError: the schedule is 'custom' and its table is incomplete, or the named schedule is not defined for the
            plan.
    """
    where = f"plan: actions[{replica}]"
    stages, micro_batches = len(plan.stages), plan.replicas[replica].micro_batches
    try:
        table = plan.table(replica)
        if table is None:
            problem = "no table is given"
        else:
            check_schedule(table, stages, micro_batches)
            _check_placed(table, plan)
            return table, None
    except ValueError as error:
        problem = str(error)
    if plan.schedule == "custom":
        raise InputError(f"{where}: {problem}; complete the table, or name a schedule: {', '.join(SCHEDULE_NAMES)}")
    try:
        made = make_schedule(plan.schedule, plan.pp, stages, micro_batches)
        _check_placed(made, plan)
    except ValueError as error:
        raise InputError(f"plan: {error}; change `schedule`, the stages, their devices or the micro-batches") from None
    if replica not in plan.actions:
        return made, None
    note = (
        f"The actions of replica {replica} do not cover its {micro_batches} micro-batches on {stages} stages "
        f"({problem}), so the {plan.schedule} table was made for them."
    )
    return made, note


def _check_placed(table: Schedule, plan: Plan) -> None:
    """Check that each stage runs on the pipeline rank whose devices the plan gives to the stage.

    Raises:
        ValueError: a stage runs on another rank; the message names the first such stage.
    """
    owner = plan.stage_owner()
    for stage, rank in table.owner().items():
        if owner[stage] != rank:
            raise ValueError(f"stage {stage} is on pipeline rank {rank}, its devices are those of rank {owner[stage]}")


def check_collective_order(plan: Plan) -> None:
    """Check that the action tables of all replicas have the collectives that the plan's sharding needs in the same
    order.

    Raises:
        InputError: the order on a pipeline rank differs between replicas, or the table of a replica is incomplete or
            not defined (see `schedule_of`).
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
    """Return the collectives that a pipeline rank runs with other replicas, in order: as 'stage 2' at level 1, as the
    action '2B' at levels 2 and 3.

    At level 1 there is a collective after each stage's last backward, at level 2 after each backward that yields
    gradients of weights, at level 3 for each action. B and W count as different collectives: B goes through a stage
    from its last block to its first, W sums all blocks at the end.

    Args:
        row: the actions of the pipeline rank.
        zero: ZeRO level, 1 to 3.
    """
    if zero == 3:
        return [f"{action.stage}{action.kind}" for action in row]
    yielding = [action for action in row if action.kind in "BW"]
    if zero == 2:
        return [f"{action.stage}{action.kind}" for action in yielding]
    return [f"stage {stage}" for stage in completion_order(row)]


def completion_order(row: Sequence[Action]) -> list[int]:
    """Return the stages of a pipeline rank in the order in which their gradients are complete: that of their last
    backward.

    Args:
        row: the actions of the pipeline rank.
    """
    last = {action.stage: index for index, action in enumerate(row) if action.kind in "BW"}
    return sorted(last, key=last.__getitem__)


def _first_difference(order: list[str], other: list[str]) -> str:
    for index, (collective, expected) in enumerate(zip(order, other, strict=False)):
        if collective != expected:
            return f"{collective} as number {index + 1}, where it is {expected}"
    return f"{len(order)} of them, where there are {len(other)}"
