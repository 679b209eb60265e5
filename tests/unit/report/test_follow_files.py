"""Following a run's files, and the lines that are shown of it."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.format.file_tail import FileTail
from hpctrain.records.history.run_log import Event
from hpctrain.report.live_run import follow
from hpctrain.report.status import read_status
from hpctrain.report.terminal import TerminalLine, live_lines, progress_line, show, status_lines


class ScriptedClock:
    """Each sleep runs the next thing that happens to the files."""

    def __init__(self, *happenings):
        self.happenings = list(happenings)
        self.slept = 0.0

    def now(self):
        return self.slept

    def wall(self):
        return self.slept

    def sleep(self, seconds):
        self.slept += seconds
        if self.happenings:
            self.happenings.pop(0)()

    def over(self):
        return not self.happenings


def test_rows_and_events_come_in_the_order_of_time(make, run_folder):
    events, rows = make.history()
    run_folder.write(events, rows)
    items = list(follow(run_folder.path, ScriptedClock(), until=lambda: True))
    assert len(items) == len(events) + len(rows)
    assert [item.time_s for item in items] == sorted(item.time_s for item in items)


def test_what_is_appended_while_following_is_seen_once(make, run_folder):
    _, rows = make.history()
    clock = ScriptedClock(lambda: run_folder.write([], rows[:3]), lambda: None, lambda: run_folder.write([], rows[3:5]))
    seen = list(follow(run_folder.path, clock, until=clock.over))
    assert [item.step for item in seen] == [1, 2, 3, 4, 5]


def test_the_last_lines_are_not_lost_when_the_run_ends(make, run_folder):
    _, rows = make.history()

    def end():
        # The run writes its last step and ends between two looks.
        run_folder.write([], rows[:1])
        return True

    assert [item.step for item in follow(run_folder.path, ScriptedClock(), until=end)] == [1]


def test_a_line_cut_short_by_a_killed_writer_is_left_out(make, run_folder):
    _, rows = make.history()
    run_folder.write([], rows[:1])
    with (run_folder.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rows[1].to_json())[:40])
    run_folder.write([], rows[2:3])  # the next writer ends the torn line first
    assert [item.step for item in follow(run_folder.path, ScriptedClock(), until=lambda: True)] == [1, 3]


def test_a_line_of_another_version_does_not_stop_the_view(make, run_folder):
    (run_folder.path / "metrics.jsonl").write_text('{"step": 1}\n[]\n7\n')
    run_folder.write([], make.history()[1][:1])
    assert [item.step for item in follow(run_folder.path, ScriptedClock(), until=lambda: True)] == [1]


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_however_a_file_is_written_each_line_is_seen_once(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("tail") / "lines.jsonl"
    data = "".join(json.dumps({"n": n, "text": "ä→" * n}) + "\n" for n in range(8)).encode()
    tail, seen, start = FileTail(path), [], 0
    for stop in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[start:stop])
        seen += tail.values()
        start = stop
    assert [value["n"] for value in seen] == list(range(8))


def test_a_progress_line(make):
    line = progress_line(make.row(7, 10, 1, valid_loss=3.25, loss=4.0), 200, step_time_s=2.0)
    assert (
        line
        == "step   7/200  loss 4.0000  valid 3.2500 (perplexity 25.79)  4.1k tokens/s  6 min 26 s left  generation 1"
    )
    assert "last step" in progress_line(make.row(200, 10), 200)


def test_progress_lines_are_thinned_and_events_are_not(make):
    events, rows = make.history()
    items = sorted([*events, *rows], key=lambda item: item.time_s)
    lines = list(live_lines(items, 40, every_s=5.0))
    told = [line.text for line in lines]
    assert sum(text.startswith("step") for text in told) < len(rows) / 3
    assert sum(not text.startswith("step") for text in told) == len(events)
    assert any(text.startswith("step 20/40") for text in told)  # it validated
    assert any(text.startswith("step 40/40") for text in told)  # the last one
    assert len(list(live_lines(items, 40))) == len(items)


def test_the_time_left_follows_the_recent_pace(make):
    rows = [make.row(step, step, step_time_s=8.0) for step in range(1, 30)]
    rows += [make.row(step, step, step_time_s=1.0) for step in range(30, 51)]
    *_, last = live_lines(rows, 60)
    assert "10 s left" in last.text


def test_passing_lines_are_overwritten_on_a_terminal_only():
    lines = [
        TerminalLine("step 1", True),
        TerminalLine("step 2", True),
        TerminalLine("a worker died", False),
        TerminalLine("step 3", True),
    ]
    plain, terminal = io.StringIO(), io.StringIO()
    show(lines, plain, in_place=False)
    show(lines, terminal, in_place=True)
    assert plain.getvalue() == "step 1\nstep 2\na worker died\nstep 3\n"
    assert terminal.getvalue() == "step 1\r\x1b[2Kstep 2\r\x1b[2Ka worker died\nstep 3\n"


def test_status_lines_tell_recoveries(make, finished_run):
    lines = status_lines(read_status(finished_run.path, make.start_s + 50), make.start_s + 50)
    assert lines[-1] == "  recoveries 1  steps done twice 5"
    assert "nodes local0, local1, local2, local3" in lines[2]


def test_events_pass_through_follow_unchanged(make, run_folder):
    events, _ = make.history()
    run_folder.write(events, [])
    seen = [item for item in follow(run_folder.path, ScriptedClock(), until=lambda: True) if isinstance(item, Event)]
    assert seen == events
