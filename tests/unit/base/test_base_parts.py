"""Errors, units, clocks, packaged data and processes."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import pytest

from hpctrain.base import errors
from hpctrain.base.clock import SystemClock, utc_text
from hpctrain.base.collector import collector_paused
from hpctrain.base.errors import CommandError, FieldError, FileError, InputError
from hpctrain.base.package_data import package_data_path
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si


def test_a_file_error_tells_every_mistake_with_its_place() -> None:
    error = FileError(
        "run.yaml", [FieldError("steps", "found 'x'", 3), FieldError("", "no keys"), FieldError("a.b", "missing")]
    )
    assert str(error).splitlines() == ["run.yaml:3: steps: found 'x'", "run.yaml: no keys", "run.yaml: a.b: missing"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("HpctrainError", 1),
        ("InputError", 2),
        ("FileError", 2),
        ("RefusedError", 4),
        ("StorageError", 1),
        ("CommandError", 1),
    ],
)
def test_exit_codes_are_those_promised(name: str, code: int) -> None:
    assert getattr(errors, name).exit_code == code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(3), "3 B"),
        (format_si(2.5e9, "B/s"), "2.5 GB/s"),
        (format_seconds(0.00012), "120 us"),
        (format_seconds(0.25), "250 ms"),
        (format_seconds(95), "1 min 35 s"),
        (format_seconds(7260), "2 h 1 min"),
        (format_count(1_300_000_000), "1.3G"),
        (utc_text(0), "1970-01-01T00:00:00Z"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected


def test_the_clock_does_not_run_backwards() -> None:
    clock = SystemClock()
    before = clock.now()
    clock.sleep(0.01)
    assert clock.now() - before >= 0.01
    assert abs(clock.wall() - time.time()) < 1.0


def test_the_garbage_collector_goes_on_after_a_pause() -> None:
    @collector_paused()
    def divide(by: int) -> float:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer pause has not ended"
        return 1 / by

    assert divide(1) == 1
    with pytest.raises(ZeroDivisionError):
        divide(0)
    assert gc.isenabled()


def test_packaged_folders_are_found_and_a_missing_one_is_told() -> None:
    assert package_data_path("topology").is_dir()
    with pytest.raises(InputError, match="topology/nothing: not found in the installation"):
        package_data_path("topology", "nothing")


def test_a_command_gives_back_its_code_and_output() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = SystemRunner().run([sys.executable, "-c", code])
    assert (done.code, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_command_that_is_missing_or_hangs_is_an_error() -> None:
    with pytest.raises(CommandError, match="no-such-command: not found on the path"):
        SystemRunner().run(["no-such-command"])
    with pytest.raises(CommandError, match="/proc/version: cannot be started: Permission denied"):
        SystemRunner().run(["/proc/version"])
    with pytest.raises(CommandError, match=r"no answer after 0\.2 s"):
        SystemRunner().run([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.2)


@pytest.mark.slow
def test_killing_a_process_ends_its_children_too(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    log = tmp_path / "log"
    process = SystemRunner().start([sys.executable, "-c", code], log=log)
    deadline = time.monotonic() + 120
    while not log.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int(log.read_text())
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -9
    while _runs(child):
        assert time.monotonic() < deadline, "the child is still alive"
        time.sleep(0.01)
    process.kill()  # once more is no error


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
