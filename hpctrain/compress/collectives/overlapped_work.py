"""Collectives under way whose time beside the computation is counted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY


class PendingWork(ABC):
    """Interface of one or more collectives, one after the other, of which this rank has begun the first."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether `wait` would neither begin a collective nor block the host."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the end of the last collective. Call it within `ACTIVITY.doing` with `waits`.

        Raises:
            RuntimeError: a collective failed.
        """

    def begin_last(self) -> None:  # noqa: B027
        """Begin all collectives that are still to begin, and wait for those that come before them. Call it within
        `ACTIVITY.doing` with `waits`. All ranks of the group call it between the same two of their other collectives.

        Raises:
            RuntimeError: a collective failed.
        """


class OverlappedWork(PendingWork):
    """A collective that this rank has begun. On a CPU, the time from its start until the rank waits for it, or until it
    ends if that comes first, counts as hidden (`Activity.add_hidden`), less the time in which the rank waited for
    something else, such as a stage message. On CUDA nothing is counted: the host does not know when a collective
    ends."""

    def __init__(self, work: dist.Work | None, device: torch.device) -> None:
        """Begin to count.

        Args:
            work: the collective; None if it has ended, or on CUDA if the caller's stream waits for it already.
            device: device of the tensors.
        """
        self._work = work
        self._start_s = time.monotonic()
        self._waited_before_s = ACTIVITY.waited_s
        self._ended: tuple[float, float] | None = None
        """When the collective ended, and the seconds of all waits by then; None: not yet."""
        self._is_counted = work is not None and device.type == "cpu"
        if work is not None and self._is_counted:
            work.get_future().add_done_callback(self._end)

    @property
    def has_ended(self) -> bool:
        # On CUDA the current stream waits, not the host.
        return self._ended is not None or not self._is_counted

    def _end(self, _future: object) -> None:
        self._ended = time.monotonic(), ACTIVITY.waited_s

    def wait(self) -> None:
        if self._is_counted:
            end_s, waited_s = self._ended or (time.monotonic(), ACTIVITY.waited_s)
            ACTIVITY.add_hidden(self._start_s, end_s, waited_s - self._waited_before_s)
        if self._work is not None:
            self._work.wait()


def begin_all_to_all(
    incoming: Tensor,
    outgoing: Tensor,
    group: dist.ProcessGroup,
    expected: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> OverlappedWork:
    """Begin to send parts of `outgoing` to the ranks of `group`, and to receive theirs into `incoming`.

    On a CPU both tensors belong to the collective until `OverlappedWork.wait`; torch keeps them in memory. On CUDA the
    current stream waits for the collective at once, because work that is queued later may read `incoming`.

    Args:
        expected: count of numbers from each rank; None: equally many from all.
        sizes: count of numbers to each rank; None: equally many to all.
    """
    work = dist.all_to_all_single(incoming, outgoing, expected, sizes, group, async_op=not incoming.is_cuda)
    return OverlappedWork(work, incoming.device)
