"""Messages under way, whose waits are recorded in `ACTIVITY`, so that a profile and the diagnosis of a hang show for
which rank a rank waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY, WaitsFor

ReceiveKey = tuple[int, int]
"""(stage that needs the message, micro-batch)."""


class TrackedReceives(dict[ReceiveKey, list[dist.Work]]):
    """Pending receives of a torch schedule, by stage and micro-batch, whose waits are recorded in `ACTIVITY` with the
    sender.

    The schedule pops an entry when it begins to wait for the entry's messages.
    """

    def __init__(
        self, what: str, step: int, owners: Sequence[int], device: torch.device, timeout: timedelta | None
    ) -> None:
        """Create the table of pending receives, without entries.

        Args:
            what: what is received, for the recorded text: 'output of' (the stage before) or 'gradient for' (the stage
                itself).
            step: number of the sending stage minus that of the receiving stage: -1 or 1.
            owners: the global rank that holds each stage.
            device: the device that receives the messages.
            timeout: how long to wait for a message; None: the timeout of its process group.
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
        return [TrackedWork(works, operation, self._timeout, self._device)]


class TrackedWork(dist.Work):
    """Messages of one operation, such as the sends of a stage's output, as one `Work` for torch to wait for. The wait
    is recorded in `ACTIVITY`."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        operation: str,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
        waits: WaitsFor = "pp",
    ) -> None:
        """Combine messages that were started.

        Args:
            works: the messages.
            operation: text that is recorded during the wait, as 'send output of stage 0 mb 1 to rank 2'.
            timeout: how long to wait for a message; None: the timeout of its process group.
            device: device of the messages. If it is a CUDA device, `wait` blocks until the messages themselves have
                arrived, so that a hang shows which rank is waited for. Only the current stream is waited for, so this
                rank's sends go on. None: `wait` does not block on CUDA.
            waits: for whom `wait` waits.
        """
        super().__init__()
        self._waits = waits
        self._works = works
        self._operation = operation
        self._timeout = timeout
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all messages; return True if all of them are complete.

        Args:
            timeout: how long to wait for a message; None: the timeout that was given to the constructor.

        Raises:
            RuntimeError: a message failed, or on a CPU took longer than the timeout.
        """
        limit = self._timeout if timeout is None else timeout
        with ACTIVITY.doing(self._operation, waits=self._waits):
            # Without a timeout gloo uses that of the process group, which is half an hour for the groups of a mesh.
            complete = [work.wait() if limit is None else work.wait(limit) for work in self._works]
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return all(complete)
