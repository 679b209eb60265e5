"""Results and failures of processes that work on one answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.worker.forked_ranks import run_forked


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_results_are_in_the_order_of_the_processes() -> None:
    here = os.getpid()
    assert run_forked(3, lambda rank: (rank * 10, os.getpid() == here)) == [(0, False), (10, False), (20, False)]
    assert run_forked(1, lambda rank: os.getpid()) == [here]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InputError("DATA: too short"), InputError, "^DATA: too short$"),
        (HpctrainError("the loss is nan"), HpctrainError, "^the loss is nan$"),
        (LookupError("seventeen\nwidgets"), HpctrainError, r"^LookupError: seventeen widgets"),
    ],
)
def test_the_first_failure_ends_all_and_is_one_line(
    tmp_path: Path, error: Exception, kind: type[HpctrainError], message: str
) -> None:
    def body(rank: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise error
        time.sleep(600)

    with pytest.raises(kind, match=message) as caught:
        run_forked(2, body)
    assert type(caught.value) is kind
    assert not psutil.pid_exists(int((tmp_path / "0").read_text()))


def test_a_killed_process_is_named() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(HpctrainError, match=r"process 1 of 2 was killed \(signal 9\).*memory.*: use fewer processes$"):
        run_forked(2, body)
