"""The files that workers need before they start, from a file system that hangs or fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from direct_executor import DirectExecutor, HungExecutor

from hpctrain.agent.decide import Decision
from hpctrain.agent.group import WorkerLog
from hpctrain.agent.start_files import PLAN_PATIENCE_S, StartFiles, StartPreparation
from hpctrain.base.errors import FieldError, FileError, StorageError, UntrustedError
from hpctrain.base.helper_thread import in_background
from hpctrain.records.history.generation import Generation, StoreAddress

RECORD = Generation(
    number=1, attempt=0, members=[], plan="plan.json", reason="start",
    store=StoreAddress(addr="127.0.0.1", port=1, node="a"),
)  # fmt: skip


class Plan:
    """As much of a plan as says how many workers a node has."""

    def __init__(self, *nodes: str) -> None:
        self.ranks = [type("Device", (), {"node": node})() for node in nodes]


class Files:
    """Plans and logs of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opened: list[WorkerLog] = []
        self.errors: list[Exception] = []

    def plan_of(self, record: Generation) -> Any:
        if self.errors:
            raise self.errors[0]
        return Plan("a", "b", "a")

    def open_logs(self, count: int) -> list[WorkerLog]:
        for rank in range(count):
            path = self._folder / f"{rank}.log"
            self.opened.append(WorkerLog(path, os.open(path, os.O_WRONLY | os.O_CREAT), 0))
        return self.opened[-count:] if count else []


def preparation(files: Files, thread: Any) -> StartPreparation:
    source: Any = files
    return StartPreparation("a", source, files, in_background(thread, lambda: None))


def is_open(log: WorkerLog) -> bool:
    try:
        os.fstat(log.descriptor)
    except OSError:
        return False
    return True


def test_workers_get_a_plan_and_a_log_each_and_who_is_no_member_no_log(tmp_path: Path) -> None:
    starting = preparation(Files(tmp_path), DirectExecutor())
    for is_member, logs in ((True, 2), (False, 0)):
        starting.begin(RECORD, None, is_member)
        assert starting.is_pending
        files = starting.poll(0.0)
        assert isinstance(files, StartFiles)
        assert len(files.logs) == logs
        assert (starting.is_pending, starting.poll(0.0)) == (False, None)
        for log in files.logs:
            log.close()


def test_what_comes_after_the_end_of_its_generation_is_closed(tmp_path: Path) -> None:
    files, thread = Files(tmp_path), HungExecutor()
    starting = preparation(files, thread)
    starting.begin(RECORD, None, True)
    assert starting.poll(0.0) is None
    starting.cancel()
    thread.let_go()
    assert len(files.opened) == 2
    assert not any(is_open(log) for log in files.opened)
    assert starting.poll(1.0) is None


@pytest.mark.parametrize("error", [FileError("plan.json", [FieldError("", "stale")]), StorageError("log: stale")])
def test_files_that_fail_are_tried_again_for_a_while_over_all_generations(tmp_path: Path, error: Exception) -> None:
    files = Files(tmp_path)
    starting = preparation(files, DirectExecutor())
    files.errors = [error]
    starting.begin(RECORD, None, True)
    assert starting.poll(0.0) is None
    starting.begin(RECORD, None, True)
    assert starting.poll(PLAN_PATIENCE_S) is None
    with pytest.raises(type(error)):
        starting.poll(PLAN_PATIENCE_S + 1)
    files.errors = []
    found = starting.poll(PLAN_PATIENCE_S + 2)
    assert isinstance(found, StartFiles)
    for log in found.logs:
        log.close()


def test_an_untrusted_plan_is_not_tried_again_and_fails_the_run(tmp_path: Path) -> None:
    files = Files(tmp_path)
    starting = preparation(files, DirectExecutor())
    files.errors = [UntrustedError("plan.json", "can be written by others", "chmod go-w plan.json")]
    starting.begin(RECORD, None, True)
    decision = starting.poll(0.0)
    assert isinstance(decision, Decision)
    assert (decision.act, decision.exit_code) == ("fail", UntrustedError.exit_code)
    assert decision.reason == str(files.errors[0])
    assert "\n" not in decision.reason
    assert (starting.is_pending, starting.poll(1.0)) == (False, None)
