"""The end of a run on a full disk: no later checkpoint makes up for the last one, so the run waits for room.

Collective over the world: every rank goes through the same rounds, rank 0's clock counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.units import format_seconds
from hpctrain.records.history.fault import fault_of
from hpctrain.worker.agent_channel import AgentChannel

RETRY_S = 2.0
"""Between two tries; the agent hears of each, and does not take the wait for a hang."""


def is_disk_full(error: str | None) -> bool:
    """Whether it was for want of room that something could not be written."""
    return error is not None and fault_of(error).name == "disk_full"


@dataclass(frozen=True)
class PendingWrites:
    """What is left to be written, and how it is tried again."""

    step: int
    save: Callable[[], str | None]
    """Save again; the error, the same on every rank. Collective."""
    flush: Callable[[], str | None]
    """Write the rows that wait, on the rank that has them; the error."""


def retry_until_written(
    writes: PendingWrites, error: str | None, limit_s: float, agent_channel: AgentChannel
) -> str | None:
    """Try again until all is written, the time is over or somebody asks to stop; the error of the checkpoint that is
    left, None when it is on disk.

    Args:
        error: why the last checkpoint is not on disk; None where it is.
    """
    deadline, told = time.monotonic() + limit_s, False
    with ACTIVITY.doing("wait for room on the disk"):
        while True:
            rows = writes.flush()
            waits, over = _agreed(is_disk_full(rows), agent_channel.stop_wanted() or time.monotonic() >= deadline)
            if over or not (is_disk_full(error) or waits):
                return error
            if not told and dist.get_rank() == 0:
                limit = format_seconds(limit_s)
                reason = f"step {writes.step}, the last one: {error or rows}; the run waits up to {limit} for room"
                agent_channel.tell("no_room", step=writes.step, reason=reason)
            told = True
            time.sleep(RETRY_S)
            agent_channel.tell("waiting")
            if is_disk_full(error):
                error = writes.save()


def _agreed(*flags: bool) -> tuple[bool, ...]:
    """Each flag as it is on any rank."""
    vector = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return tuple(value > 0 for value in vector.tolist())
