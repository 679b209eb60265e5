"""Events on a full disk: none is lost while the agent lives."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from pathlib import Path

import pytest
from fake_clock import FakeClock

from hpctrain.agent import event_log as module
from hpctrain.agent.event_log import EventLog
from hpctrain.records.history.run_log import read_events


def test_events_that_find_no_room_are_written_with_the_next_one_that_does(tmp_path, small_files):
    path = tmp_path / "events.jsonl"
    event_log = EventLog(path, "n0", 0, FakeClock())
    event_log.write("attempt_started", -1, "first")
    # Its log would be as full; that this ends nobody is the stamped output's business.
    with contextlib.redirect_stdout(io.StringIO()), small_files(path.stat().st_size):
        event_log.write("checkpoint_skipped", 0, "no room", step=8)
        event_log.write("waiting_for_room", 0, "still none", step=8)
    assert [event.reason for event in read_events(path)] == ["first"]
    event_log.write("checkpoint_saved", 0, "there is some", step=8)
    assert [event.reason for event in read_events(path)] == ["first", "no room", "still none", "there is some"]


def test_a_journal_in_a_folder_that_is_gone_ends_nobody(tmp_path: Path) -> None:
    EventLog(tmp_path / "gone" / "events.jsonl", "n0", 0, FakeClock()).write("failed", 0, "the folder is gone")


def test_in_the_background_nobody_waits_for_the_file_and_the_order_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hangs = tmp_path / "events.jsonl", threading.Event()
    append = module.append_line

    def hanging(path: Path, text: str) -> None:
        assert hangs.wait(60)
        append(path, text)

    monkeypatch.setattr(module, "append_line", hanging)
    event_log = EventLog(path, "n0", 0, FakeClock())
    with event_log.in_background():
        for number in range(20):
            event_log.write("planned", number, f"plan {number}")
            print(f"line {number}", flush=True)
        assert not path.exists()
        hangs.set()
    assert [event.reason for event in read_events(path)] == [f"plan {number}" for number in range(20)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("line")]
    assert lines == [f"line {number}" for number in range(20)]
    event_log.write("failed", 20, "at once")
    assert read_events(path)[-1].reason == "at once"


def test_a_file_that_hangs_does_not_keep_an_agent_from_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hangs = tmp_path / "events.jsonl", threading.Event()
    append = module.append_line

    def hanging(path: Path, text: str) -> None:
        assert hangs.wait(60)
        append(path, text)

    monkeypatch.setattr(module, "append_line", hanging)
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    event_log = EventLog(path, "n0", 0, FakeClock())
    with event_log.in_background():
        event_log.write("planned", 1, "first")
    event_log.write("failed", 1, "second")
    assert not path.exists()
    hangs.set()
    deadline = time.monotonic() + 60
    while len(read_events(path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [event.reason for event in read_events(path)] == ["first", "second"]
