"""The last writes of a run on a full disk: tried again, for as long as told, and not against somebody's wish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpctrain.agent.worker_messages import Report
from hpctrain.worker import disk_full
from hpctrain.worker.disk_full import PendingWrites, is_disk_full, retry_until_written

FULL = "/runs/x/checkpoints: no room for a checkpoint of step 32: 1.0 MiB are free, 3.0 MiB are needed; free some space"


class Heard:
    """An agent that asks to stop after so many messages."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.kinds: list[str] = []
        self._stop_after = stop_after

    def send(self, report: Report) -> None:
        self.kinds.append(report.kind)

    def stop_wanted(self) -> bool:
        return self._stop_after is not None and len(self.kinds) >= self._stop_after


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(disk_full, "RETRY_S", 0.0)


def writes(saves: list[str | None], rows: list[str | None]) -> PendingWrites:
    """What each try gives; of the rows, the last one for ever."""
    return PendingWrites(32, lambda: saves.pop(0), lambda: rows.pop(0) if len(rows) > 1 else rows[0])


def test_it_tries_until_there_is_room() -> None:
    heard: Any = Heard()
    assert retry_until_written(writes([FULL, FULL, None], [None]), FULL, 1e6, heard) is None
    assert heard.kinds == ["no_room", "waiting", "waiting", "waiting"]


def test_rows_that_find_no_room_are_waited_for_too() -> None:
    heard: Any = Heard()
    row = "/runs/x/metrics.jsonl: cannot write: No space left on device; free some space"
    assert retry_until_written(writes([], [row, row, None]), None, 1e6, heard) is None
    assert heard.kinds == ["no_room", "waiting", "waiting"]


def test_what_is_written_is_not_waited_for() -> None:
    heard: Any = Heard()
    assert retry_until_written(writes([], [None]), None, 1e6, heard) is None
    denied = "/runs/x: cannot write: Permission denied; choose a folder that you may write to"
    assert retry_until_written(writes([], [None]), denied, 1e6, heard) == denied
    assert heard.kinds == []


def test_the_time_is_over_and_a_wish_to_stop_comes_first() -> None:
    heard: Any = Heard()
    assert retry_until_written(writes([], [None]), FULL, 0.0, heard) == FULL
    assert heard.kinds == []
    asked: Any = Heard(stop_after=3)
    assert retry_until_written(writes([FULL] * 9, [None]), FULL, 1e6, asked) == FULL
    assert asked.kinds == ["no_room", "waiting", "waiting"]


@pytest.mark.parametrize("words", ["Disk quota exceeded", "No space left on device"])
def test_a_quota_is_a_full_disk(words: str) -> None:
    assert is_disk_full(f"/runs/x: rank 0 cannot write: {words}")
    assert not is_disk_full(None)


def test_the_pieces_of_the_loop_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank says counts here: its rows wait, its agent asks to stop."""
    flags = SimpleNamespace(values=[[1.0, 0.0], [0.0, 1.0]])

    def other_rank(tensor: Any, op: Any) -> None:
        tensor.copy_(tensor.maximum(tensor.new_tensor(flags.values.pop(0))))

    monkeypatch.setattr(dist, "all_reduce", other_rank)
    heard: Any = Heard()
    assert retry_until_written(writes([], [None]), None, 1e6, heard) is None
    assert heard.kinds == ["no_room", "waiting"]
