"""Commands of hpctrain as forks of one process that has loaded torch: they start in milliseconds, not in seconds.

`ForkedCommand([sys.executable, "-m", "hpctrain", "train", …])` does what `subprocess.Popen` does, and every process of
hpctrain that this command starts by Python's path is forked, too, by the process that would start it: the processes of
nodes, their fork servers, and workers. All have the parents, descriptors, environment and command lines that they have
otherwise. Where a test is about a start itself (of Python, or of a command that a shell types), it starts Python.

The process in between is the fork server of `hpctrain.worker.forking`, with this file as its program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hpctrain.base.forking import ForkingRunner
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, SystemRunner
from hpctrain.base.system.kernel import set_child_subreaper

HERE = (sys.executable, __file__)
LOADED = ("hpctrain.cli.commands.train", "hpctrain.cli.commands.submit", "hpctrain.node.run", "hpctrain.worker.train")
"""What is loaded once. The fork server adds what it needs."""
STARTS = (["-m"], program("")[1:-1])
"""Words between Python and the name of a module of hpctrain."""
ROOM = 4000
"""Bytes of the first process's command line, in which those of all others have to fit."""
_PATH: list[str] = []
"""Where a Python that is started searches for modules, in the fork server."""
_STREAMS: list[Any] = []


class ForkedCommand:
    """A command `python -m hpctrain …` that runs, with the part of subprocess.Popen that tests use."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], merged: bool) -> None:
        """
        Args:
            argv: begins with sys.executable; then -m and a module of hpctrain, or -c and a program.
            merged: whether what the command says on stderr is a part of its output.
        """
        self._files = [tempfile.NamedTemporaryFile() for _ in range(1 if merged else 2)]  # noqa: SIM115 - closed below
        out, error = Path(self._files[0].name), Path(self._files[-1].name)
        with error.open("ab") as stderr:
            self._process = _fork(argv, cwd, env, out, stderr.fileno())
        self.returncode: int | None = None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return the output and what was said on stderr."""
        if self.wait(timeout) is None:
            self.kill()
            raise subprocess.TimeoutExpired(HERE, timeout or 0)
        said = [Path(file.name).read_text() for file in self._files]
        for file in self._files:
            file.close()
        return said[0], said[1] if len(said) > 1 else ""

    def wait(self, timeout: float | None = None) -> int | None:
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRunner(SystemRunner):
    """Starts processes of hpctrain, in the current folder and with a log, as forks; does all else as a SystemRunner."""

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | int | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Process:
        assert isinstance(log, Path)
        assert not keep_fds
        return _fork(argv, Path.cwd(), os.environ if env is None else env, log, 1)


def run(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`hpctrain WORDS` to its end."""
    return _run(["-m", "hpctrain", *words], cwd, env)


def run_program(
    text: str, *words: str, cwd: Path, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """`python -c TEXT WORDS` to its end."""
    return _run(["-c", text, *words], cwd, env)


def _run(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    process = ForkedCommand([sys.executable, *words], cwd, env, merged=False)
    out, error = process.communicate(timeout=800)
    return subprocess.CompletedProcess(list(words), process.returncode or 0, out, error)


def _fork(argv: Sequence[str], cwd: Path, env: Mapping[str, str], out: Path, error: int) -> Process:
    """A fork with that command line, whose stderr is a descriptor of this process; 1: its output."""
    server = _server()
    # Only at this moment: other orphans are reaped where they are otherwise.
    set_child_subreaper()
    process = server.start([*HERE, str(cwd), str(error), *argv], env=env, log=out, keep_fds=(error,) * (error > 2))
    while not process.pid and process.poll() is None:
        server.receive_replies(None)
    set_child_subreaper(False)
    return process


@functools.cache
def _server() -> ForkingRunner:
    """The fork server of this process."""
    return ForkingRunner(HERE, ["fork", "-" * ROOM], dict(os.environ))


def close() -> None:
    """End the fork server."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()


def _become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Do what a new Python with this command line and environment does, and end.

    Args:
        argv: Python, one of STARTS and the name of a module, or -c and a program; and arguments.
    """
    code = 1
    try:
        what, *words = argv[2:]
        _set_up(argv, environ)
        if argv[1] == "-c":
            sys.argv = ["-c", *words]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        else:
            sys.argv = [what, *words]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _set_up(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """What Python does before a program's first line, as far as the process that was forked did it otherwise."""
    atexit._clear()
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    _STREAMS.append((sys.stdin, sys.stdout, sys.stderr))  # whose end would close the descriptors
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.orig_argv = list(argv)
    _set_command_line(argv)
    added = [item for item in environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path[:] = [*(["", *added] if argv[1] in ("-m", "-c") else added), *_PATH]
    for folder in added:
        if (custom := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(custom))


def _set_command_line(argv: Sequence[str]) -> None:
    """Show these words in /proc/PID/cmdline, as exec does."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    text = _as_bytes(argv)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _as_bytes(argv: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in argv)


_EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = inspect.signature(_EXECUTE)


def _execute_child(process: Any, *args: Any) -> None:
    """Instead of Popen's own: fork where a module of hpctrain would be run by this Python. A process with threads
    cannot be forked, and a longer command line has no room."""
    given = _PARAMETERS.bind(process, *args).arguments
    argv = list(given["args"])
    ours = argv[:1] == [sys.executable] and argv[1:2] in STARTS and "hpctrain" in argv[2]
    if not ours or len(_as_bytes(argv)) > ROOM or threading.active_count() > 1:
        _EXECUTE(process, *args)
        return
    environ = dict(os.environ if given["env"] is None else given["env"])
    process.pid = os.fork()
    if process.pid == 0:
        try:
            pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            _take_descriptors(pipes, given["pass_fds"])
            if given["start_new_session"]:
                os.setsid()
            if given["cwd"] is not None:
                os.chdir(given["cwd"])
        except BaseException:
            traceback.print_exc()
            os._exit(255)
        _become(argv, environ)
    process._child_created = True
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in names))


def _take_descriptors(streams: Sequence[int], passed: Sequence[int]) -> None:
    """Put these (-1: as they are) at 0, 1, 2, and close all but them and what is passed on."""
    high = [number if number == -1 else os.dup(number) for number in streams]
    for number, descriptor in enumerate(high):
        if descriptor != -1:
            os.dup2(descriptor, number)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *passed}:  # noqa: PTH208
        with contextlib.suppress(OSError):
            os.close(number)


def _command(words: list[str]) -> NoReturn:
    """A fork of the server: folder, number of its stderr, command line."""
    folder, error, *argv = words
    os.chdir(folder)
    os.dup2(int(error), 2)
    _take_descriptors((-1, -1, -1), ())
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    _become(argv, dict(os.environ))


if __name__ == "__main__":
    from hpctrain.worker import forking

    _PATH += sys.path[1:]
    forking.LOADED = (*LOADED, *forking.LOADED)
    sys.exit(forking.main([word for word in sys.argv[2:] if not word.startswith("---")], _command))
