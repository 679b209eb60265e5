"""Workers by fork: they are what the same command line would have started, whenever they are asked for and ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.base.errors import EXIT_USAGE
from hpctrain.base.forking import ForkingRunner
from hpctrain.base.linux import adopt_orphans

# A program with the same two ends as `python -m hpctrain.worker`, without torch: it loads for as long as LOADS says.
PROGRAM = """
import json, os, signal, sys, time
from hpctrain.worker import forking

class Cuda:
    _is_in_bad_fork = staticmethod(lambda: bool(os.environ.get("TOUCHED")))

class Torch:
    cuda = Cuda

def run(words):
    if words[0] == "tell":
        with open(int(words[1]), "w") as out:
            env = {key: os.environ.get(key) for key in ("A", "B", "C")}
            json.dump({"pid": os.getpid(), "leader": os.getsid(0), "parent": os.getppid(), "env": env}, out)
        print("said")
    if words[0] == "sleep":
        time.sleep(60)
    if words[0] == "leave":
        # Two that outlive their parent: one of its session, and one with a session of its own.
        for lead in (False, True):
            if not (pid := os.fork()):
                os.setsid() if lead else None
                os.read(int(words[1]), 1)
                os._exit(0)
            os.write(int(words[2]), f"{pid}{os.linesep}".encode())
    return int(words[-1])

def main(words):
    return forking.main(words[1:], run) if words[0] == "fork" else run(words)

forking._load = lambda: time.sleep(float(os.environ.get("LOADS", 0)))
sys.modules["torch"] = Torch
sys.exit(main(sys.argv[1:]))
"""
ENV = {**os.environ, "A": "1", "B": "2"}


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return (sys.executable, str(tmp_path / "program.py"))


@pytest.fixture
def runner(program: tuple[str, ...]) -> Iterator[ForkingRunner]:
    made = ForkingRunner(program, ["fork"], ENV)
    yield made
    made.close()
    # Orphans of later tests are none of this process's business.
    adopt_orphans(False)


def server_of(program: tuple[str, ...]) -> psutil.Process:
    (found,) = (child for child in psutil.Process().children() if child.cmdline()[1:3] == [program[1], "fork"])
    return found


def test_a_fork_is_a_child_with_what_it_was_promised(
    runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    told = {}
    for number, env in enumerate(({**ENV, "C": "3"}, {key: ENV[key] for key in ENV if key != "A"})):
        ours, theirs = os.pipe()
        process = runner.start([*program, "tell", str(theirs), str(number)], env, log, [theirs])
        os.close(theirs)
        with open(ours) as said:  # noqa: PTH123 - a descriptor
            told[number] = json.load(said)
        assert process.wait() == number
        assert process.poll() == number
        assert told[number]["pid"] == told[number]["leader"] == process.pid
        assert told[number]["parent"] == os.getpid()
    assert [told[number]["env"] for number in told] == [
        {"A": "1", "B": "2", "C": "3"},
        {"A": None, "B": "2", "C": None},
    ]
    assert log.read_text() == "before\nsaid\nsaid\n"


def test_orphans_are_let_go_and_no_exit_code_is_taken(
    runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path
) -> None:
    wait, go = os.pipe()
    told, tell = os.pipe()
    asked = [*program, "leave", str(wait), str(tell), "9"]
    worker = runner.start(asked, ENV, tmp_path / "log", [wait, tell])
    assert worker.wait() == 9
    os.close(tell)
    with open(told) as said:  # noqa: PTH123 - a descriptor
        # Orphans hold the other end, so as many lines as there are and no more.
        orphans = [int(said.readline()) for _ in range(2)]
    runner.reap()
    assert [psutil.Process(pid).ppid() for pid in orphans] == [os.getpid()] * 2, "they live, and are adopted"
    forked = runner.start([*program, "exit", "3"], ENV, tmp_path / "log")
    plain = runner.start([sys.executable, "-c", "raise SystemExit(5)"], ENV, tmp_path / "log")
    command = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    runner.hear(None)
    os.write(go, b"12")
    ended = [*orphans, forked.pid, plain.pid, command.pid]
    while any(process.status() != psutil.STATUS_ZOMBIE for process in map(psutil.Process, ended)):
        time.sleep(0.01)
    runner.reap()
    assert not [pid for pid in orphans if psutil.pid_exists(pid)]
    assert (forked.wait(), plain.wait(), command.wait()) == (3, 5, 7)
    os.close(wait)
    os.close(go)


def test_killed_it_is_gone_at_once(runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path) -> None:
    process = runner.start([*program, "sleep", "0"], ENV, tmp_path / "log")
    while not process.pid:
        assert process.poll() is None
    process.kill()
    assert process.wait() == -9
    assert not psutil.pid_exists(process.pid)
    assert runner.start([*program, "exit", "3"], ENV, tmp_path / "log").wait() == 3


def test_what_is_killed_before_it_began_never_begins(program: tuple[str, ...], tmp_path: Path) -> None:
    runner = ForkingRunner(program, ["fork"], {**ENV, "LOADS": "60"})
    adopt_orphans(False)
    ours, theirs = os.pipe()
    process = runner.start([*program, "tell", str(theirs), "0"], ENV, tmp_path / "log", [theirs])
    os.close(theirs)
    assert process.poll() is None
    assert process.wait(0.1) is None
    process.kill()
    assert (process.poll(), process.pid) == (-9, 0)
    with open(ours) as said:  # noqa: PTH123 - a descriptor
        assert said.read() == ""
    # From then on commands start like any others.
    assert runner.start([*program, "exit", "4"], ENV, tmp_path / "log").wait() == 4


def test_without_the_one_that_forks_commands_start_all_the_same(
    runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path
) -> None:
    assert runner.start([*program, "exit", "3"], ENV, tmp_path / "log").wait() == 3
    server_of(program).kill()
    left = runner.start([*program, "exit", "5"], ENV, tmp_path / "log")
    # Where the order went out before it was noticed, the process is one that was killed.
    assert left.wait() in (5, -9)
    assert runner.start([*program, "exit", "6"], ENV, tmp_path / "log").wait() == 6


def test_other_commands_are_none_of_its_business(runner: ForkingRunner, tmp_path: Path) -> None:
    process = runner.start([sys.executable, "-c", "import sys; sys.exit(7)"], ENV, tmp_path / "log")
    assert process.wait() == 7


def test_a_fork_that_cannot_use_the_gpu_begins_anew(
    runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path
) -> None:
    process = runner.start([*program, "exit", "8"], {**ENV, "TOUCHED": "yes"}, tmp_path / "log")
    assert process.wait() == EXIT_USAGE
    assert "usage: python -m hpctrain.worker" in (tmp_path / "log").read_text()


def test_it_ends_with_the_process_that_asks_while_it_still_loads(program: tuple[str, ...]) -> None:
    asks = (
        "import os, time; from hpctrain.base.forking import ForkingRunner; "
        f"runner = ForkingRunner({program!r}, ['fork'], {{**os.environ, 'LOADS': '60'}}); print(flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (server,) = psutil.Process(parent.pid).children()
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        server.wait(30)
