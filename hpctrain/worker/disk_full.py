"""Repeats the last writes of a run while the disk is full. If an earlier checkpoint cannot be written, the run goes on,
because a later one follows; none follows the last one.

All ranks try together, and all give up when the time limit is over on one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.agent.worker_messages import NoDiskSpace, Waiting
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.units import format_seconds
from hpctrain.records.history.fault import fault_of
from hpctrain.worker.agent_channel import AgentChannel

RETRY_S = 2.0
"""Seconds between two tries. The worker reports each try, so that the agent does not take the wait for a hang."""


def is_disk_full(error: str | None) -> bool:
    """Return whether a write failed because the disk is full.

    Args:
        error: text of the write's error; None if the write succeeded.
    """
    return error is not None and fault_of(error).name == "disk_full"


@dataclass(frozen=True)
class PendingWrites:
    """The last writes of a run, of which some failed, as functions that try them again."""

    step: int
    """Number of the run's last step."""
    save: Callable[[], str | None]
    """Saves the checkpoint again and returns the error, the same on every rank; None if the checkpoint is on disk.
    Collective over all ranks."""
    flush: Callable[[], str | None]
    """On rank 0, writes the rows of metrics.jsonl that are not on disk yet, and returns the error; None if all rows
    are on disk. Raises Superseded if the worker's generation is over."""


def retry_until_written(
    writes: PendingWrites, error: str | None, limit_s: float, agent_channel: AgentChannel
) -> str | None:
    """Repeat the writes that a full disk prevented, until all are on disk, `limit_s` is over or the agent orders a
    stop. An error other than a full disk is not retried. Collective over all ranks.

    Args:
        error: why the last checkpoint is not on disk; None if it is.
        limit_s: seconds after which to give up.

    Returns:
        The error of the last try to save the checkpoint; None if it is on disk.

    Raises:
        Superseded: the worker's generation is over, and rows of metrics.jsonl are not on disk.
    """
    deadline, reported = time.monotonic() + limit_s, False
    with ACTIVITY.doing("wait for room on the disk"):
        while True:
            rows = writes.flush()
            waits, over = _agreed(is_disk_full(rows), agent_channel.stop_wanted() or time.monotonic() >= deadline)
            if over or not (is_disk_full(error) or waits):
                return error
            if not reported and dist.get_rank() == 0:
                limit = format_seconds(limit_s)
                reason = f"step {writes.step}, the last one: {error or rows}; the run waits up to {limit} for room"
                agent_channel.send(NoDiskSpace(step=writes.step, reason=reason))
            reported = True
            time.sleep(RETRY_S)
            agent_channel.send(Waiting())
            if is_disk_full(error):
                error = writes.save()


def _agreed(*flags: bool) -> tuple[bool, ...]:
    """Return for each flag whether it is true on any rank. Collective over all ranks."""
    vector = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return tuple(value > 0 for value in vector.tolist())
