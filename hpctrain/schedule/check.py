"""Checks that an action table can be run: each action once, on its own rank, in an order that the data allows."""

from __future__ import annotations

from collections import Counter

from hpctrain.records.plan.schedule import Action, Schedule


def check_schedule(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Check that the table is complete and can be executed.

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


def inputs_of(action: Action, stages: int) -> tuple[tuple[int, str, int], ...]:
    """Return what the action waits for: (stage, 'F' | 'B' | 'I', micro-batch), where 'B' stands for B or I of that
    stage.
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


def execution_order(schedule: Schedule, stages: int) -> list[tuple[int, Action]]:
    """Return (pipeline rank, action) pairs, sorted so that each action comes after those that it waits for.

    Raises:
        ValueError: a rank waits for ever.
    """
    order: list[tuple[int, Action]] = []
    done: set[tuple[int, str, int]] = set()
    position = [0] * len(schedule.ranks)
    before = -1
    while len(order) > before:
        before = len(order)
        for rank, row in enumerate(schedule.ranks):
            at = position[rank]
            while at < len(row) and done.issuperset(inputs_of(row[at], stages)):
                action = row[at]
                done.add(action)
                if action.kind == "I":
                    done.add((action.stage, "B", action.micro_batch))
                order.append((rank, action))
                at += 1
            position[rank] = at
    for rank, row in enumerate(schedule.ranks):
        if position[rank] < len(row):
            action = row[position[rank]]
            missing = next(need for need in inputs_of(action, stages) if need not in done)
            raise ValueError(
                f"pipeline rank {rank}: {action} waits for {Action(*missing)}, which never comes before it; "
                "the table cannot be executed"
            )
    return order
