"""Finds the ranks that block a generation from each worker's activity, and describes them in a sentence with rank, step
and operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

MAX_GROUPS_SHOWN = 4
"""Most hanging ranks, and most groups of waiting ranks, that a report names. Ranks usually wait in few places, and a
longer list helps nobody."""
MAX_WORKERS_PER_NODE = 1024
"""Most workers of one node that a heartbeat may list; a node has one worker for each device."""


ShortText = Annotated[str, Field(max_length=1000)]


class WorkerActivity(NamedTuple):
    """What one worker of the generation does now. Heartbeats and events carry a list of such activities."""

    rank: Annotated[int, Field(ge=0)]
    """The worker's rank in the whole job."""
    place: ShortText
    """The worker's device, written 'node:device'."""
    step: Annotated[int, Field(ge=0)]
    """Number of the optimizer step under way, from 1; 0 before the first."""
    operation: ShortText
    """The worker's operation in words: 'forward stage 1 mb 3'."""
    waits: bool
    """Whether the operation ends only when another rank does its part."""
    state: ShortText = ""
    """State of the process if the process cannot run, as 'stopped by a signal'; else empty."""


def blocking_workers(doing: Sequence[WorkerActivity]) -> tuple[WorkerActivity, ...]:
    """Return the workers that block the others: those whose process cannot run; if there are none, those whose
    operation waits for no other rank."""
    stopped = tuple(item for item in doing if item.state)
    return stopped or tuple(item for item in doing if not item.waits)


def describe_hang(doing: Sequence[WorkerActivity]) -> str:
    """Return a text about a hang, as 'rank 1 (n0:cuda1) hangs in step 7: forward stage 1 mb 3; ranks 0, 2 wait in step
    7: …'.

    Args:
        doing: activities of the generation's workers, as far as known.
    """
    guilty = sorted(blocking_workers(doing), key=lambda item: item.rank)
    waiting = sorted((item for item in doing if item not in guilty), key=lambda item: item.rank)
    parts = [_hang_text(item) for item in guilty[:MAX_GROUPS_SHOWN]]
    parts += [f"{len(guilty) - MAX_GROUPS_SHOWN} more hang"] if len(guilty) > MAX_GROUPS_SHOWN else []
    if not guilty:
        parts.append("every rank waits for another, as when a message was lost or the network is cut")
    return "; ".join(parts + _group(waiting))


def _hang_text(item: WorkerActivity) -> str:
    state = f" is {item.state}" if item.state else " hangs"
    return f"rank {item.rank} ({item.place}){state} in step {item.step}: {item.operation}"


def _group(waiting: Sequence[WorkerActivity]) -> list[str]:
    """Return a text for each group of ranks that wait in the same step and operation, and one for all groups beyond
    `MAX_GROUPS_SHOWN`."""
    groups: dict[tuple[int, str], list[int]] = {}
    for item in waiting:
        groups.setdefault((item.step, item.operation), []).append(item.rank)
    parts = []
    for (step, operation), ranks in list(groups.items())[:MAX_GROUPS_SHOWN]:
        who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_listed(ranks)} wait"
        parts.append(f"{who} in step {step}: {operation}")
    others = sum(len(ranks) for ranks in list(groups.values())[MAX_GROUPS_SHOWN:])
    return [*parts, f"{others} more ranks wait elsewhere"] if others else parts


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
