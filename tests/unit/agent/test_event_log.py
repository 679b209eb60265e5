"""Events on a full disk: none is lost while the agent lives."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from fake_clock import FakeClock

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
