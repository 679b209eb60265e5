"""Collectives under way whose time beside the computation is counted."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY


class OverlappedWork:
    """A collective that this rank has begun. On a CPU, the time from its start until the rank waits for it, or until it
    ends if that comes first, counts as hidden (`Activity.add_hidden`), less the time in which the rank waited for
    something else, such as a stage message. On CUDA nothing is counted: the host does not know when a collective
    ends."""

    def __init__(self, work: dist.Work | None, device: torch.device) -> None:
        """Begin to count.

        Args:
            work: the collective; None on CUDA if the caller's stream waits for it already.
            device: device of the tensors.
        """
        self._work = work
        self._start_s = time.monotonic()
        self._waited_before_s = ACTIVITY.waited_s
        self._ended: tuple[float, float] | None = None
        """When the collective ended, and the seconds of all waits by then; None: not yet."""
        self._is_counted = device.type == "cpu"
        if work is not None and self._is_counted:
            work.get_future().add_done_callback(self._end)

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would not block the host: on a CPU whether the collective has ended, on CUDA always."""
        return self._ended is not None or not self._is_counted

    def _end(self, _future: object) -> None:
        self._ended = time.monotonic(), ACTIVITY.waited_s

    def wait(self) -> None:
        """Wait for the end of the collective. Call it within `ACTIVITY.doing` with `waits`.

        Raises:
            RuntimeError: the collective failed.
        """
        if self._is_counted:
            end_s, waited_s = self._ended or (time.monotonic(), ACTIVITY.waited_s)
            ACTIVITY.add_hidden(self._start_s, end_s, waited_s - self._waited_before_s)
        if self._work is not None:
            self._work.wait()


def begin_all_to_all(incoming: Tensor, outgoing: Tensor, group: dist.ProcessGroup) -> OverlappedWork:
    """Begin to send equal parts of `outgoing` to the ranks of `group`, and to receive theirs into `incoming`.

    On a CPU both tensors belong to the collective until `OverlappedWork.wait`; torch keeps them in memory. On CUDA the
    current stream waits for the collective at once, because work that is queued later may read `incoming`.
    """
    work = dist.all_to_all_single(incoming, outgoing, group=group, async_op=not incoming.is_cuda)
    return OverlappedWork(work, incoming.device)
