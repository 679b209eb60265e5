"""The critical path of a step's pipeline: the actions and messages that it waits for, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.planner.simulate.engine import Timeline
from hpctrain.records.plan.schedule import Action


@dataclass(frozen=True)
class PathSegment:
    """Consecutive actions on one pipeline rank, each of which starts when the one before it ends."""

    rank: int
    actions: tuple[Action, ...]
    start: float
    """Seconds from the start of the step."""
    end: float
    waited: float
    """Seconds between the end of the previous segment and the start of this one, in which a message travels; 0 for the
    first.
    """


def critical_path(line: Timeline) -> list[PathSegment]:
    """Return the segments from the start of the step to the last action.

    An action starts when its rank is free and its message has arrived. The path goes back from the last action; at each
    action it follows the later of these two. Actions that are not on the path may be somewhat slower without harm.
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
        rank_was_free = line.spans[rank][index - 1][2] if index else 0.0
        if action in line.senders and start - rank_was_free > 1e-12 * (1 + start):
            sender_rank, sender_index = where[line.senders[action]]
            sent = line.spans[sender_rank][sender_index][2]
            segments.append(PathSegment(rank, tuple(reversed(actions)), start, end, start - sent))
            rank, index, actions, end = sender_rank, sender_index, [], sent
        else:
            index -= 1
    segments.append(PathSegment(rank, tuple(reversed(actions)), line.spans[rank][0][1], end, 0.0))
    return segments[::-1]
