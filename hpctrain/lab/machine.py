"""The lab's access to this machine: commands, time, processes, random bytes, and the files with mounts and host
names."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.base.clock import Clock, SystemClock
from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import CommandResult, Runner, SystemRunner

_COMMAND_TIMEOUT_S = 30.0
# A name in Linux's abstract socket namespace (unix(7)) vanishes with its process and leaves no file.
_LOCK = "\0hpctrain-lab"


class ProcessTable:
    """The processes of this machine, without zombies."""

    def commands(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield (process id, argv) of each living process that has an argv; threads of the kernel have none."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                argv = process.cmdline()
                if argv:
                    yield process.pid, argv

    def newest_first(self, pids: Iterable[int]) -> list[int]:
        """Return those of the processes that still exist, the last started first: children before their parents."""
        starts = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                starts.append((psutil.Process(pid).create_time(), pid))
        return [pid for _, pid in sorted(starts, reverse=True)]

    def signal(self, pid: int, number: int) -> None:
        """Send the signal `number` to a process; do nothing if the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True)
class Machine:
    """Everything on this machine that the lab uses; tests replace the parts."""

    runner: Runner
    clock: Clock
    processes: ProcessTable
    hosts: Path = Path("/etc/hosts")
    mounts: Path = Path("/proc/self/mounts")
    uid: Callable[[], int] = os.getuid
    hostname: Callable[[], str] = socket.gethostname
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))

    def run(self, argv: Sequence[str]) -> CommandResult:
        """Run a command that must succeed, and return its output.

        Raises:
            CommandError: the command could not start, failed, or took longer than 30 s; the message has its error text.
        """
        done = self.try_run(argv)
        if done.code != 0:
            words = " ".join((done.stderr or done.stdout).split())
            raise CommandError(f"{' '.join(argv)}: ended with {done.code}: {words}")
        return done

    def try_run(self, argv: Sequence[str]) -> CommandResult:
        """Run a command that may fail, and return its exit code and output.

        Raises:
            CommandError: the command could not start, or took longer than 30 s.
        """
        return self.runner.run(argv, timeout_s=_COMMAND_TIMEOUT_S)

    def run_all(self, commands: Iterable[Sequence[str]]) -> None:
        """Run commands in order, and stop at the first that fails.

        Raises:
            CommandError: a command failed; the message has its error text.
        """
        for argv in commands:
            self.run(argv)

    def wait(self, until: Callable[[], bool], timeout_s: float, pause_s: float = 0.1) -> bool:
        """Wait until `until` returns True, and return True; return False if that takes longer than `timeout_s`."""
        deadline = self.clock.now() + timeout_s
        while not until():
            if self.clock.now() >= deadline:
                return False
            self.clock.sleep(pause_s)
        return True

    def kill(self, pids: Callable[[], Sequence[int]], timeout_s: float = 10.0) -> int:
        """Send SIGKILL to the processes that `pids` returns, and repeat until it returns none; return how many
        processes were killed.

        Raises:
            CommandError: processes still exist after `timeout_s`.
        """
        killed: set[int] = set()

        def none_left() -> bool:
            # The death of a parent would wake its stopped children with SIGHUP and SIGCONT (setpgid(2), orphaned
            # process groups): an srun that wakes so ends its job step on all other nodes.
            living = self.processes.newest_first(pids())
            killed.update(living)
            for pid in living:
                self.processes.signal(pid, signal.SIGKILL)
            return not living

        if not self.wait(none_left, timeout_s, pause_s=0.02):
            raise CommandError(f"processes {', '.join(map(str, pids()))} do not end in spite of SIGKILL; see `ps -l`")
        return len(killed)


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(SystemRunner(), SystemClock(), ProcessTable())


@contextlib.contextmanager
def lab_lock() -> Iterator[None]:
    """Hold this machine's lock of labs for the `with` block: only one command at a time builds, changes or takes down a
    lab.

    Raises:
        InputError: another command holds the lock.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(_LOCK)
        except OSError:
            raise InputError("another `hpctrain lab` command is at work on this machine; wait for its end") from None
        yield
