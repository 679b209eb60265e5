"""A collective under way whose time beside the computation is counted."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY


class OverlappedWork:
    """A collective that this rank has begun. On a CPU its seconds until the rank waits for it, or until it ends if that
    is earlier, count as hidden (`Activity.add_hidden`); on CUDA the host does not know when a collective ends."""

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work = work
        self._start_s = time.monotonic()
        self._end_s: float | None = None
        self._is_counted = device.type == "cpu"
        if self._is_counted:
            work.get_future().add_done_callback(self._end)

    def _end(self, _future: object) -> None:
        self._end_s = time.monotonic()

    def wait(self) -> None:
        """Wait for the end of the collective. Call it within `ACTIVITY.doing` with `waits`.

        Raises:
            RuntimeError: the collective failed.
        """
        if self._is_counted:
            ACTIVITY.add_hidden(self._start_s, self._end_s or time.monotonic())
        self._work.wait()
