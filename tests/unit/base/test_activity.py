"""What a process says it does is read by another one, also when the first cannot answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hpctrain.base.activity import Activity, ActivityRecord, read_record, shared_record


@pytest.fixture
def record() -> Iterator[int]:
    descriptor = shared_record()
    yield descriptor
    os.close(descriptor)


def test_a_record_that_nobody_has_written_is_none(record: int) -> None:
    assert read_record(record) is None


def test_operations_nest_and_the_record_follows(record: int) -> None:
    activity = Activity()
    activity.share(record)
    activity.begin_step(3)
    with activity.doing("reduce dp", waits="dp"):
        outer = read_record(record)
        with activity.doing("all-reduce over dp, bucket 2", waits="dp"):
            inner = read_record(record)
        assert read_record(record) == outer
    assert outer is not None
    assert inner is not None
    assert (outer.step, outer.operation, outer.waits) == (3, "reduce dp", True)
    assert inner.operation == "all-reduce over dp, bucket 2"
    assert inner.since_s >= outer.since_s
    after = read_record(record)
    assert after is not None
    assert (after.operation, after.waits) == ("step 3", False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("hpctrain.base.activity.time.monotonic", lambda: now[0])
    return now


def test_a_wait_within_another_counts_once(clock: list[float]) -> None:
    activity = Activity()
    with activity.doing("backward"):
        clock[0] += 5
        with activity.doing("gather of weights", waits="dp"):
            clock[0] += 1
    with activity.doing("reduce dp", waits="dp"):
        clock[0] += 0.25
        with activity.doing("whether gradients overflowed", waits="world"):
            clock[0] += 2
        clock[0] += 0.5
    assert activity.take_waits() == {"dp": 1.75, "world": 2.0}
    assert activity.take_waits() == {}


def test_what_is_under_way_before_a_wait_is_hidden(clock: list[float]) -> None:
    activity = Activity()
    clock[0] += 10
    with activity.doing("reduce dp", waits="dp"):
        clock[0] += 3
        with activity.doing("all-reduce over dp, bucket 0", waits="dp"):
            activity.add_hidden(101.0, 104.0)
            activity.add_hidden(103.0, 112.0)  # it ended within the wait, which is not hidden
            activity.add_hidden(111.0, 112.0)  # sent within the wait
    assert activity.take_hidden_s() == pytest.approx(9.0)
    assert activity.take_hidden_s() == 0.0


def test_what_failed_stays_in_the_record() -> None:
    activity = Activity()
    with pytest.raises(OSError, match="gone"), activity.doing("outer"), activity.doing("recv", waits="dp"):
        raise OSError("gone")
    assert activity.now.operation == "recv"


@pytest.mark.parametrize("operation", ["x" * 1000, "größe " * 40, "two\nlines", ""])
def test_any_operation_fits(record: int, operation: str) -> None:
    activity = Activity()
    activity.share(record)
    activity.write(ActivityRecord(1, operation, True, 2.5))
    found = read_record(record)
    assert found is not None
    assert operation.replace("\n", " ").startswith(found.operation.rstrip("\ufffd"))
    assert (found.step, found.waits, found.since_s) == (1, True, 2.5)


def test_spans_are_opened_only_while_somebody_records_them() -> None:
    activity = Activity()
    seen: list[str] = []

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append("end")

    with activity.doing("before"):
        pass
    activity.annotate = span
    with pytest.raises(ValueError, match="x"), activity.doing("optimizer"):
        raise ValueError("x")
    assert seen == ["optimizer", "end"]


def test_a_stopped_process_still_tells_what_it_does(record: int) -> None:
    script = (
        "import sys, signal, os\nfrom hpctrain.base.activity import ACTIVITY\nACTIVITY.share(int(sys.argv[1]))\n"
        "ACTIVITY.begin_step(7)\nwith ACTIVITY.doing('forward stage 1 mb 3'):\n    os.kill(os.getpid(), signal.SIGSTOP)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(record)], pass_fds=(record,))
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        found = read_record(record)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert found is not None
    assert (found.step, found.words()) == (7, "forward stage 1 micro-batch 3")
