"""Lines with their time: what is written, and what is read back from it."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.output_streams import TimestampedStream, format_timestamp, parse_timestamp


class Raw(io.BytesIO):
    """What has reached the file."""

    def close(self) -> None:
        """Kept open, to be looked at after the stream is gone."""


def written(*texts: str) -> bytes:
    moments = iter(range(1_000))
    raw = Raw()
    stream = TimestampedStream(raw, lambda: float(next(moments)))
    for text in texts:
        stream.write(text)
    stream.flush()
    return raw.getvalue()


def test_a_line_has_the_time_of_its_beginning():
    expected = b"1970-01-01T00:00:00.000Z loss 3.2\n1970-01-01T00:00:02.000Z next\n"
    assert written("loss ", "3.2\n", "next\n") == expected


def test_what_the_job_script_says_of_an_attempt_has_a_time_in_its_log(tmp_path):
    program = [sys.executable, "-m", "hpctrain.node", "end", "--folder", str(tmp_path), "--attempt", "0", "--code", "1"]
    done = subprocess.run(program, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.splitlines()
    stamped = parse_timestamp(line)
    assert stamped is not None
    assert stamped[1].startswith(b"hpctrain node: ")


def test_a_progress_bar_is_one_line():
    assert written("10%\r", "20%\r", "done\n") == b"1970-01-01T00:00:00.000Z 10%\r20%\rdone\n"


def test_whole_lines_are_in_the_file_at_once():
    raw = Raw()
    stream = TimestampedStream(raw, lambda: 0.0)
    print("a step", file=stream)
    assert raw.getvalue().endswith(b"Z a step\n")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=8), max_size=6))
def test_what_was_written_is_read_back(texts):
    lines = written(*texts).split(b"\n")
    found = [parse_timestamp(line) for line in lines if line]
    assert all(found)
    whole = "".join(texts)
    assert [line[1].decode() for line in found] == whole.removesuffix("\n").split("\n") if whole else not found


@given(st.floats(0, 4e9))
def test_a_moment_is_read_to_the_millisecond(moment):
    time_s, rest = parse_timestamp(format_timestamp(moment).encode() + b"text")
    assert abs(time_s - moment) < 1.1e-3
    assert rest == b"text"


def test_what_only_looks_like_a_stamp_is_text():
    assert parse_timestamp(b"2026-13-41T00:00:00.000Z x") is None
    assert parse_timestamp(b"Traceback (most recent call last):") is None


def test_a_full_disk_ends_no_process(tmp_path, small_files):
    path = tmp_path / "a.log"
    with path.open("wb") as file, small_files(60):
        stream = TimestampedStream(file, lambda: 0.0)
        for _ in range(1000):
            print("a line that is told", file=stream, flush=True)
        stream.detach()
        file.raw.close()
    assert path.read_bytes().startswith(b"1970-01-01T00:00:00.000Z a line that is told\n")


CRASH = """
import os, sys
from hpctrain.base.output_streams import timestamp_output
timestamp_output()
print("before")
print("why", file=sys.stderr)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_every_line():
    done = subprocess.run(
        [sys.executable, "-c", CRASH], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ, check=False
    )
    assert [parse_timestamp(line)[1] for line in done.stdout.splitlines()] == [b"before", b"why"]
