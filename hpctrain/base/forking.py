"""A Runner that starts workers by fork from a process that has loaded their libraries.

Loading torch takes seconds on a quiet disk and far more on a shared file system. With this a node loads it once, from
its first moment on, and a worker of a later generation begins in milliseconds. The other end is
`hpctrain.worker.forking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hpctrain.base.linux import adopt_orphans
from hpctrain.base.process import Process, SystemRunner, kill_group

MESSAGE_BYTES = 1 << 17
MOST_FDS = 16


class ForkedProcess:
    """A process that was forked on order, and adopted: a child like any other, and leader of its own process group."""

    def __init__(self, runner: ForkingRunner) -> None:
        self.pid = 0
        """0 until the fork is told of."""
        self._runner = runner
        self._process: psutil.Process | None = None
        self._code: int | None = None

    def begin(self, pid: int) -> None:
        """It was forked; 0 where it never will be."""
        try:
            self._process = psutil.Process(pid) if pid else None
        except psutil.NoSuchProcess:
            self._process = None
        self.pid = pid
        self._code = None if self._process else -signal.SIGKILL

    def poll(self) -> int | None:
        return self.wait(0.0)

    def kill(self) -> None:
        self._runner.hear(0.0)
        if not self.pid and self._code is None:
            # Its order still waits, and is carried out by nobody then.
            self._runner.close()
        if self.pid and self._code is None:
            kill_group(self.pid)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout_s: float | None = None) -> int | None:
        if not self.pid and self._code is None:
            self._runner.hear(timeout_s)
        if self._code is None and self._process is not None:
            with contextlib.suppress(psutil.TimeoutExpired):
                code = self._process.wait(timeout_s)
                self._code = -signal.SIGKILL if code is None else int(code)
        return self._code


class ForkingRunner(SystemRunner):
    """Starts what begins with `program` by fork, and all else as a SystemRunner does.

    When the process that forks is gone, commands start as everywhere else. For one thread.
    """

    def __init__(self, program: Sequence[str], verb: Sequence[str], env: Mapping[str, str]) -> None:
        """Start loading; orders may be given at once, and wait for that.

        Args:
            program: argv that all of its commands begin with.
            verb: with these words after it, the program loads and forks.
            env: of the process that loads. What libraries read when they are loaded (OMP_NUM_THREADS) holds for all
                of its forks; the rest may change from one to the next.
        """
        self._program = tuple(program)
        self._env = dict(env)
        self._asked: deque[ForkedProcess] = deque()
        self._server: Process | None = None
        self._started: list[Process] = []
        """Whose end somebody here will ask for."""
        self._adopts = adopt_orphans()
        if not self._adopts:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [*program, *verb, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._server = super().start(words, env=env, keep_fds=(theirs.fileno(),))

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Process:
        size = len(self._program)
        if self._server is not None and log is not None and tuple(argv[:size]) == self._program:
            with contextlib.suppress(OSError):  # nobody there, or an environment that is too long
                self._order(argv[size:], os.environ if env is None else env, log, keep_fds)
                self._asked.append(ForkedProcess(self))
                self._started.append(self._asked[-1])
                return self._asked[-1]
        self._started.append(super().start(argv, env, log, keep_fds))
        return self._started[-1]

    def hear(self, timeout_s: float | None) -> None:
        """Let processes that were forked know it, waiting for the next one at most that long (None: without end)."""
        while self._asked and select.select([self._channel], [], [], timeout_s)[0]:
            try:
                answer = self._channel.recv(MESSAGE_BYTES)
            except OSError:
                answer = b""
            if not answer:
                self._over()
                return
            self._asked.popleft().begin(int(json.loads(answer)["pid"]))
            timeout_s = 0.0

    def reap(self) -> None:
        self._started = [process for process in self._started if process.poll() is None]
        # WNOWAIT: whose it is decides who takes its exit code.
        if not self._adopts or os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):  # somebody else has taken it
                if child.status() == psutil.STATUS_ZOMBIE and self._is_orphan(child.pid):
                    os.waitpid(child.pid, os.WNOHANG)

    def _is_orphan(self, pid: int) -> bool:
        """Whether nobody here will ask for the end of this child."""
        session = os.getsid(pid)
        if session == os.getsid(0):
            return False  # a command that ran to its end, in some thread
        if session != pid:
            return True  # all that is started here leads a session of its own
        known = {process.pid for process in self._started} | {self._server.pid if self._server else 0}
        return not self._asked and pid not in known

    def close(self) -> None:
        """End the process that forks, and orders that it has not come to; what it has forked stays."""
        if self._server is not None:
            self._server.kill()
            self.hear(None)
            self._over()

    def _order(self, words: Sequence[str], env: Mapping[str, str], log: Path, keep_fds: Sequence[int]) -> None:
        order = {
            "argv": list(words),
            "set": {key: value for key, value in env.items() if self._env.get(key) != value},
            "unset": [key for key in self._env if key not in env],
            "fds": list(keep_fds),
        }
        with log.open("ab") as output:
            socket.send_fds(self._channel, [json.dumps(order).encode()], [output.fileno(), *keep_fds])

    def _over(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
            self._channel.close()
        while self._asked:
            self._asked.popleft().begin(0)
