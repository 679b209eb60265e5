"""Workers by fork: they are what the same command line would have started, whenever they are asked for and ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.base import forking
from hpctrain.base.errors import EXIT_USAGE
from hpctrain.base.forking import ForkedProcess, ForkingRunner, ForkServerExit
from hpctrain.base.process import Process
from hpctrain.base.system.kernel import set_child_subreaper

# A program with the same two ends as `python -m hpctrain.worker`, without torch: it loads until the file GATE is there.
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

def load():
    while not os.path.exists(os.environ.get("GATE", "/")):
        time.sleep(0.005)
    if "FAILS" in os.environ:
        sys.exit(3)

forking._load = load
sys.modules["torch"] = Torch
sys.exit(main(sys.argv[1:]))
"""
ENV = {**os.environ, "A": "1", "B": "2"}


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return (sys.executable, str(tmp_path / "program.py"))


@pytest.fixture
def make(program: tuple[str, ...]) -> Iterator[Callable[..., ForkingRunner]]:
    """Makes runners that are closed after the test; losses of their servers go to a list that is given."""
    runners = []

    def made(losses: list[ForkServerExit] | None = None, **env: str) -> ForkingRunner:
        runners.append(ForkingRunner(program, ["fork"], {**ENV, **env}, lost=([] if losses is None else losses).append))
        return runners[-1]

    yield made
    for runner in runners:
        runner.close()
    # Orphans of later tests are none of this process's business.
    set_child_subreaper(False)


@pytest.fixture
def runner(make: Callable[..., ForkingRunner]) -> ForkingRunner:
    return make()


def server_of(program: tuple[str, ...]) -> psutil.Process:
    # A fork has the same command line, and leads a session of its own like it: the first one is the server.
    servers = [child for child in psutil.Process().children() if child.cmdline()[1:3] == [program[1], "fork"]]
    return min(servers, key=lambda child: child.create_time())


def assert_forked(process: Process, program: tuple[str, ...], forked: bool = True) -> None:
    """A process that sleeps was forked by a server, whose command line it then has; it is ended."""
    while not process.pid:
        assert process.poll() is None
    assert (psutil.Process(process.pid).cmdline()[1:3] == [program[1], "fork"]) == forked
    process.kill()
    assert process.wait() == -9


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


@pytest.mark.parametrize(("count", "forked"), [(200, True), (300, False)])
def test_a_worker_inherits_any_number_of_descriptors(
    runner: ForkingRunner, program: tuple[str, ...], tmp_path: Path, count: int, forked: bool
) -> None:
    """One message takes 253 of them; with more, the process is started without the fork server."""
    ours, theirs = os.pipe()
    more = [os.dup(theirs) for _ in range(count)]
    process = runner.start([*program, "tell", str(more[-1]), "3"], ENV, tmp_path / "log", [theirs, *more])
    for descriptor in (theirs, *more):
        os.close(descriptor)
    with open(ours) as said:  # noqa: PTH123 - a descriptor
        assert json.load(said)["parent"] == os.getpid()
    assert process.wait() == 3
    assert isinstance(process, ForkedProcess) == forked


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
    runner.receive_replies(None)
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


def test_what_is_killed_before_it_began_never_begins_and_the_server_goes_on_loading(
    make: Callable[..., ForkingRunner], program: tuple[str, ...], tmp_path: Path
) -> None:
    losses: list[ForkServerExit] = []
    runner = make(losses, GATE=str(tmp_path / "gate"))
    server = server_of(program).pid
    ours, theirs = os.pipe()
    process = runner.start([*program, "tell", str(theirs), "0"], ENV, tmp_path / "log", [theirs])
    os.close(theirs)
    assert process.poll() is None
    assert process.wait(0.1) is None
    process.kill()
    assert (process.poll(), process.pid) == (-9, 0)
    runner.reap()
    later = runner.start([*program, "sleep", "0"], ENV, tmp_path / "log")
    (tmp_path / "gate").touch()
    assert_forked(later, program)
    with open(ours) as said:  # noqa: PTH123 - a descriptor
        assert said.read() == ""
    assert server_of(program).pid == server
    assert losses == []


def test_where_there_is_no_child_at_all_nothing_is_reaped(runner: ForkingRunner) -> None:
    runner.close()
    child = os.fork()  # which has no children, whatever other tests have left to this process
    if child == 0:
        code = 1
        try:
            assert psutil.Process().children() == []
            runner.reap()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("loading", [True, False])
def test_a_server_that_is_killed_is_replaced_and_told_of(
    make: Callable[..., ForkingRunner], program: tuple[str, ...], tmp_path: Path, loading: bool
) -> None:
    losses: list[ForkServerExit] = []
    gate = tmp_path / "gate"
    runner = make(losses, GATE=str(gate))
    if not loading:
        gate.touch()
        assert runner.start([*program, "exit", "3"], ENV, tmp_path / "log").wait() == 3
    killed = server_of(program)
    process = runner.start([*program, "exit", "5"], ENV, tmp_path / "log") if loading else None
    killed.kill()
    while not losses:
        runner.reap()
    assert losses == [ForkServerExit(-9, loading, replaced=True)]
    assert server_of(program).pid != killed.pid
    gate.touch()
    assert process is None or process.wait() == -9
    assert_forked(runner.start([*program, "sleep", "0"], ENV, tmp_path / "log"), program)


def test_a_server_that_hangs_is_replaced_when_its_order_is_withdrawn(
    make: Callable[..., ForkingRunner], program: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "REPLY_TIMEOUT_S", 0.2)
    losses: list[ForkServerExit] = []
    runner = make(losses)
    assert runner.start([*program, "exit", "3"], ENV, tmp_path / "log").wait() == 3
    server = server_of(program)
    server.suspend()
    while server.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    process = runner.start([*program, "exit", "4"], ENV, tmp_path / "log")
    process.kill()
    assert process.wait() == -9
    assert [loss.replaced for loss in losses] == [True]
    assert runner.start([*program, "exit", "6"], ENV, tmp_path / "log").wait() == 6


def test_a_server_that_cannot_load_is_not_replaced_and_commands_start_all_the_same(
    make: Callable[..., ForkingRunner], program: tuple[str, ...], tmp_path: Path
) -> None:
    losses: list[ForkServerExit] = []
    runner = make(losses, FAILS="yes")
    assert runner.start([*program, "exit", "5"], ENV, tmp_path / "log").wait() == -9
    assert losses == [ForkServerExit(3, loading=True, replaced=False)]
    assert "exit code 3 while it loaded; workers start without one" in losses[0].words()
    assert_forked(runner.start([*program, "sleep", "0"], ENV, tmp_path / "log"), program, forked=False)


def test_servers_that_are_killed_again_and_again_are_given_up(
    make: Callable[..., ForkingRunner], program: tuple[str, ...], tmp_path: Path
) -> None:
    losses: list[ForkServerExit] = []
    runner = make(losses, GATE=str(tmp_path / "gate"))
    for number in range(forking.MAX_SERVER_EXITS):
        server_of(program).kill()
        while len(losses) == number:
            runner.reap()
    assert [loss.replaced for loss in losses] == [True] * (forking.MAX_SERVER_EXITS - 1) + [False]
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
        f"runner = ForkingRunner({program!r}, ['fork'], {{**os.environ, 'GATE': '/nowhere'}}); print(flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (server,) = psutil.Process(parent.pid).children()
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        server.wait(30)
