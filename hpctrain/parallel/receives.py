"""What a pipeline waits for from its neighbours, said while it waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY

Key = tuple[int, int]
"""(stage that needs the message, micro-batch)."""


class NotedReceives(dict[Key, list[dist.Work]]):
    """The receives under way of torch's schedule, which takes one out when it begins to wait for it."""

    def __init__(self, what: str, step: int, owners: Sequence[int]) -> None:
        """
        Args:
            what: 'output of' (the stage before) or 'gradient for' (the stage itself).
            step: from the stage that needs the message to the one that sends it: -1 or 1.
            owners: the global rank that holds each stage.
        """
        super().__init__()
        self._what = what
        self._step = step
        self._owners = owners

    def pop(self, key: Key, *default: list[dist.Work]) -> list[dist.Work]:  # type: ignore[override]
        works = super().pop(key, *default)
        stage, micro_batch = key
        sender = self._owners[stage + self._step]
        whose = min(stage, stage + self._step)
        return [NotedWork(works, f"recv {self._what} stage {whose} mb {micro_batch} from rank {sender}")]  # type: ignore[list-item]


class NotedWork:
    """Receives that belong together; waited for as torch waits for one."""

    def __init__(self, works: Sequence[dist.Work], operation: str) -> None:
        self._works = works
        self._operation = operation

    def wait(self) -> None:
        """Wait for all of them."""
        with ACTIVITY.doing(self._operation, waits=True):
            for work in self._works:
                work.wait()
