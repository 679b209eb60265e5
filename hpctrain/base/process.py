"""Runs commands and starts processes. Code that runs commands takes a Runner as an argument, so that tests can pass a
fake one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from hpctrain.base.errors import CommandError, CommandTimeoutError
from hpctrain.base.module_argv import program

WORKER = tuple(program("hpctrain.worker"))
"""argv of the program that loads torch; one of its verbs (train, measure, …) has to follow."""

WORKER_NAME = "rank {}"
"""Process name of a worker that trains; its rank is filled in."""

_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM)
"""Signals that this process may ignore; `replace_process` gives them back their default action, because a command would
inherit ignored signals."""


@dataclass(frozen=True)
class CommandResult:
    """A command that ended: its argv, its exit code (-n if signal n killed it) and its output."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


class Process(Protocol):
    """A started process."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n killed the process; None while the process runs."""

    def kill(self) -> None:
        """Send SIGKILL to the process group that the process leads; do not wait for its end."""

    def terminate(self) -> None:
        """Send SIGTERM to the process alone, not to its group."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the process and return its exit code, -n if signal n killed it; None if it still runs
        after `timeout_s` seconds (None: wait without limit)."""


def end_process(process: Process) -> None:
    """Kill the process group if the process still runs, and wait for the end of the process."""
    if process.poll() is None:
        process.kill()
        process.wait()


class Runner(Protocol):
    """Runs commands to their end, and starts processes."""

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command to its end, without input, and return its exit code and output.

        Args:
            env: environment of the command; None: that of this process.

        Raises:
            CommandTimeoutError: the command did not end within `timeout_s` seconds and was killed.
            CommandError: the command could not start.
        """

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | int | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Process:
        """Start a command in its own process group, without input.

        Args:
            env: environment of the command; None: that of this process.
            log: file to which the output is appended, or a descriptor of it, which stays open; None: the output goes
                where that of this process goes.
            keep_fds: descriptors of this process that the command inherits.

        Raises:
            CommandError: the command could not start.
            OSError: the log cannot be opened.
        """

    def reap(self) -> None:
        """Collect the exit codes of ended processes that this process adopted when their parents, started by this
        Runner, had ended."""

    def replace_process(self, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
        """Replace this process by the command (exec), which inherits the terminal and the process id.

        Raises:
            CommandError: the command could not start; this process goes on.
        """


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group whose leader is process `pid`; do nothing if the group is gone."""
    with contextlib.suppress(ProcessLookupError):  # already gone
        os.killpg(pid, signal.SIGKILL)


class SystemProcess:
    """A process of this machine, leader of its own process group."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        kill_group(self.pid)

    def terminate(self) -> None:
        self._popen.terminate()

    def wait(self, timeout_s: float | None = None) -> int | None:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class SystemRunner:
    """A Runner that runs commands on this machine."""

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        try:
            done = subprocess.run(
                list(argv),
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # names and comments of other people may hold any bytes
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise CommandError(f"{argv[0]}: not found on the path") from error
        except OSError as error:
            raise CommandError(f"{argv[0]}: cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise CommandTimeoutError(f"{argv[0]}: no answer after {timeout_s:g} s") from error
        return CommandResult(tuple(argv), done.returncode, done.stdout, done.stderr)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | int | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Process:
        opened = log.open("ab") if isinstance(log, Path) else None  # handed to the child, closed below
        output = log if isinstance(log, int) else opened
        try:
            popen = subprocess.Popen(
                list(argv),
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=tuple(keep_fds),
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{argv[0]}: cannot start: {error.strerror}") from error
        finally:
            if opened:
                opened.close()
        return SystemProcess(popen)

    def reap(self) -> None:
        """Do nothing: a SystemRunner adopts no processes, so none of them is left to reap."""

    def replace_process(self, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        # The command would inherit ignored signals: `hpctrain exec … yes | head` would never end.
        before = {number: signal.signal(number, signal.SIG_DFL) for number in _RESTORED}
        try:
            os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:
            raise CommandError(f"{argv[0]}: cannot start: {error.strerror}") from error
        finally:  # it did not start: this process goes on as it was
            for number, handler in before.items():
                signal.signal(number, handler)
