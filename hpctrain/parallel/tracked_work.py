"""Messages between the stages of a pipeline, with what they are said while they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY

ReceiveKey = tuple[int, int]
"""(stage that needs the message, micro-batch)."""


class TrackedReceives(dict[ReceiveKey, list[dist.Work]]):
    """The receives under way of torch's schedule, which takes one out when it begins to wait for it."""

    def __init__(
        self, what: str, step: int, owners: Sequence[int], device: torch.device, timeout: timedelta | None
    ) -> None:
        """
        Args:
            what: 'output of' (the stage before) or 'gradient for' (the stage itself).
            step: from the stage that needs the message to the one that sends it: -1 or 1.
            owners: the global rank that holds each stage.
            device: where the messages arrive.
            timeout: how long a message is waited for; None: as long as its process group says.
        """
        super().__init__()
        self._what = what
        self._step = step
        self._owners = owners
        self._device = device
        self._timeout = timeout

    def pop(self, key: ReceiveKey, *default: list[dist.Work]) -> list[dist.Work]:  # type: ignore[override]
        works = super().pop(key, *default)
        stage, micro_batch = key
        sender = self._owners[stage + self._step]
        whose = min(stage, stage + self._step)
        operation = f"recv {self._what} stage {whose} mb {micro_batch} from rank {sender}"
        return [TrackedWork(works, operation, self._timeout, self._device)]  # type: ignore[list-item]


class TrackedWork:
    """Messages that belong together; waited for as torch waits for one."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        operation: str,
        timeout: timedelta | None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            device: with a CUDA device `wait` also waits for the message itself, or a hang would not say whom it waits
                for. Only the current stream is waited for: what this rank sends goes on beside it.
        """
        self._works = works
        self._operation = operation
        self._timeout = timeout
        self._device = device

    def wait(self) -> None:
        """Wait for all of them."""
        with ACTIVITY.doing(self._operation, waits=True):
            for work in self._works:
                # gloo keeps to the time that a group was made with, and a mesh makes its groups with half an hour.
                work.wait() if self._timeout is None else work.wait(self._timeout)
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
