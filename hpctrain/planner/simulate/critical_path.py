"""The critical path of a step's pipeline: the actions and messages that it waits for, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.planner.simulate.engine import StageDurations, Timeline
from hpctrain.records.plan.schedule import Action


@dataclass(frozen=True)
class PathSegment:
    """A run of actions on one pipeline rank, each of which starts when the one before it ends."""

    rank: int
    actions: tuple[Action, ...]
    start: float
    """Seconds from the start of the step."""
    end: float
    waited: float
    """Seconds between the end of the previous segment and the start of this one (the message); 0 for the first."""


def critical_path(line: Timeline, durations: StageDurations) -> list[PathSegment]:
    """Return the segments from the start of the step to the last action.

    An action starts when its rank is free and its message has arrived. The path goes back from the last action, each
    time to the later of these two. Actions that are not on it may be somewhat slower without harm.
    """
    where = {action: (rank, index) for rank, row in enumerate(line.spans) for index, (action, _, _) in enumerate(row)}
    rank = max(range(len(line.spans)), key=line.rank_end)
    index: int = len(line.spans[rank]) - 1
    segments: list[PathSegment] = []
    actions: list[Action] = []
    end = line.rank_end(rank)
    while index >= 0:
        action, start, _ = line.spans[rank][index]
        actions.append(action)
        came = _sender(action, where, line, durations)
        own_end = line.spans[rank][index - 1][2] if index else 0.0
        if came is not None and start - own_end > 1e-12 * (1 + start):
            sender_rank, sender_index = came
            sent = line.spans[sender_rank][sender_index][2]
            segments.append(PathSegment(rank, tuple(reversed(actions)), start, end, start - sent))
            rank, index, actions, end = sender_rank, sender_index, [], sent
        else:
            index -= 1
    segments.append(PathSegment(rank, tuple(reversed(actions)), line.spans[rank][0][1], end, 0.0))
    return segments[::-1]


def _sender(
    action: Action, where: dict[Action, tuple[int, int]], line: Timeline, durations: StageDurations
) -> tuple[int, int] | None:
    """(rank, index in its row) of the action whose message this one needs; None if it needs none."""
    stage, kind, micro_batch = action
    last = len(durations.forward) - 1
    if kind == "F" and stage > 0:
        wanted = [Action(stage - 1, "F", micro_batch)]
    elif kind in ("B", "I") and stage < last:
        wanted = [Action(stage + 1, other, micro_batch) for other in ("B", "I")]
    else:
        return None
    return next((where[other] for other in wanted if other in where), None)
