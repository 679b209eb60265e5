"""Many logs as one: the order of lines, the end of large files, and following what is still written."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.output_streams import format_timestamp
from hpctrain.report import logs
from hpctrain.report.logs import LogFile, LogReader, follow_lines, last_lines


def log(path: Path, *lines: tuple[float, str] | str, end: str = "\n") -> LogFile:
    """A log of stamped lines and of lines as libraries print them."""
    text = "\n".join(line if isinstance(line, str) else format_timestamp(line[0]) + line[1] for line in lines)
    path.write_text(text + end)
    return LogFile(path, path.stem)


def texts(files: list[LogFile], count: int | None = None) -> list[str]:
    return [line.text for line in last_lines(files, count)[1]]


def test_lines_are_merged_by_time_and_a_line_without_stays_behind_its_own(tmp_path):
    one = log(tmp_path / "a.log", (1.0, "a1"), "  detail of a1", (4.0, "a4"))
    two = log(tmp_path / "b.log", "head of b", (2.0, "b2"), (3.0, "b3"))
    assert texts([one, two]) == ["a1", "  detail of a1", "head of b", "b2", "b3", "a4"]
    assert texts([one, two], 2) == ["b3", "a4"]


def test_the_last_line_of_a_crash_has_no_end(tmp_path):
    assert texts([log(tmp_path / "a.log", (1.0, "a1"), "Segmentation fault", end="")]) == ["a1", "Segmentation fault"]


def test_a_log_without_any_time_has_that_of_its_file(tmp_path):
    file = log(tmp_path / "7.job.log", "slurmstepd: error")
    (line,) = last_lines([file], None)[1]
    assert line.time_s == pytest.approx(file.path.stat().st_mtime)


def test_what_slurm_says_between_an_attempts_beginning_and_its_end_is_about_the_end(tmp_path):
    agent = log(tmp_path / "agent.log", (5.0, "training"), (8.0, "leaving"))
    script = log(tmp_path / "7.job.log", (1.0, "begins"), "srun: error", (9.0, "ends"), "slurmstepd: error")
    lines = list(last_lines([agent, LogFile(script.path, "script", is_script=True)], None)[1])
    expected = ["begins", "training", "leaving", "srun: error", "ends", "slurmstepd: error"]
    assert [line.text for line in lines] == expected
    assert lines[-1].time_s == pytest.approx(script.path.stat().st_mtime)


def test_the_end_of_a_large_log_is_not_looked_for_from_its_beginning(tmp_path, monkeypatch):
    file = log(tmp_path / "a.log", *((float(n), f"line {n}") for n in range(20_000)))
    read = []
    block = logs._block
    monkeypatch.setattr(logs, "_block", lambda path, offset: read.append(offset) or block(path, offset))
    assert texts([file], 3) == ["line 19997", "line 19998", "line 19999"]
    assert min(read) > file.path.stat().st_size - 2 * logs.BLOCK_BYTES


def test_lines_at_the_end_know_the_stamp_before_them(tmp_path):
    noise = ["x" * 99] * 2000
    file = log(tmp_path / "a.log", (5.0, "a5"), *noise)
    (line,) = last_lines([file], 1)[1]
    assert line.time_s == 5.0


def test_a_file_without_line_breaks_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"y" * (5 * logs.BLOCK_BYTES))
    assert max(len(text) for text in texts([LogFile(path, "a")])) == logs.BLOCK_BYTES
    assert len(texts([LogFile(path, "a")], 2)) == 2


@given(st.lists(st.text("ab", max_size=5), max_size=30), st.integers(1, 40), st.booleans(), st.integers(4, 40))
def test_the_last_lines_are_the_last_lines(tmp_path_factory, lines, count, ended, block):
    path = tmp_path_factory.mktemp("logs") / "a.log"
    text = "\n".join(lines) + ("\n" if ended else "")
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK_BYTES", max(block, 8))
        assert texts([LogFile(path, "a")], count) == text.removesuffix("\n").split("\n")[-count:] if text else True


def test_only_lines_of_the_times_asked_for(tmp_path):
    file = log(tmp_path / "a.log", (1.0, "a1"), (2.0, "a2"), "of a2", (3.0, "a3"))
    assert texts([LogFile(file.path, "a", ((2.0, 3.0),))], 10) == ["a2", "of a2"]


def test_following_goes_on_in_new_files_and_ends_with_the_run(tmp_path):
    first = log(tmp_path / "a.log", (1.0, "a1"), format_timestamp(2.0), end="")
    rounds = 0

    def slept(_seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        with first.path.open("a") as file:
            file.write({1: "hal", 2: "f\n"}.get(rounds, ""))
        if rounds == 3:
            log(tmp_path / "b.log", (4.0, "new attempt"), "unended", end="")

    readers, shown = last_lines([first], 5, rest=False)
    assert [line.text for line in shown] == ["a1"]

    def find() -> list[LogFile]:
        return [LogFile(path, path.stem) for path in sorted(tmp_path.glob("*.log"))]

    found = follow_lines(readers, find, FakeClock(on_sleep=slept), lambda: rounds == 4)
    assert [line.text for line in found] == ["half", "new attempt", "unended"]


def test_a_log_that_goes_away_ends(tmp_path):
    reader = LogReader(log(tmp_path / "a.log", (1.0, "a1")))
    (tmp_path / "a.log").unlink()
    assert list(reader.lines()) == []
