"""A Runner that starts workers through a fork server: a process that has already loaded their libraries, and forks
them.

Loading torch takes seconds on a quiet disk and far more on a shared file system. With a fork server, a node loads torch
once, and a worker of a later generation starts in milliseconds. The code of the fork server is in
`hpctrain.worker.forking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.base.process import Process, SystemRunner, kill_group
from hpctrain.base.system.kernel import set_child_subreaper

MESSAGE_BYTES = 1 << 17
MAX_FDS = 253
"""Most descriptors in one message, by Linux (SCM_MAX_FD). A worker that inherits more is not forked, but started."""
REPLY_TIMEOUT_S = 3.0
"""Seconds to wait for a reply. A loaded fork server forks within milliseconds; a server without a reply in this time
counts as hanging and is replaced."""
MAX_SERVER_EXITS = 8
"""Number of fork servers that may be lost in one attempt. When this many are lost, workers start without a fork
server."""


@dataclass(frozen=True)
class ForkServerExit:
    """The end of a fork server that ended unexpectedly, or was killed because it hung."""

    code: int
    """Exit code of the fork server; -n if signal n killed it."""
    loading: bool
    """Whether the fork server was still loading its libraries."""
    replaced: bool
    """Whether a new fork server has been started."""

    def words(self) -> str:
        """Return a sentence that says how the fork server ended and how workers start from now on."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        when = " while it loaded" if self.loading else ""
        then = "a new one loads" if self.replaced else "workers start without one from now on, which takes longer"
        return f"the fork server {how}{when}; {then}"


class ForkedProcess:
    """A worker that the fork server forks on request. The process that asked for the fork adopts the worker and so
    becomes its parent (child subreaper). The worker leads its own process group."""

    def __init__(self, runner: ForkingRunner, token: int) -> None:
        """Represent a request to fork, until the fork server answers it.

        Args:
            runner: the runner that sent the request.
            token: read end of a pipe that holds one byte; the fork server has the same end. The side that reads the
                byte decides: the server forks, or this side withdraws the request.
        """
        self.pid = 0
        """Process id; 0 until the fork server reports it."""
        self._runner = runner
        self._token = token
        self._process: psutil.Process | None = None
        self._code: int | None = None

    def withdraw_request(self) -> None:
        """Make the fork server skip the request, unless it has already begun to fork for it."""
        if os.read(self._token, 1):
            self._begin(0)

    def end_request(self, pid: int) -> None:
        """End the request to fork: close the caller's end of the pipe `token`, and set the id of the forked process to
        `pid`. A `pid` of 0 means that the fork server will never fork it.
        """
        os.close(self._token)
        if self.waits:
            self._begin(pid)

    def _begin(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid) if pid else None
        except psutil.NoSuchProcess:
            self._process = None
        self.pid = pid
        self._code = None if self._process else -signal.SIGKILL

    @property
    def waits(self) -> bool:
        """Whether the fork server has not yet answered the request for this process."""
        return not self.pid and self._code is None

    def poll(self) -> int | None:
        return self.wait(0.0)

    def kill(self) -> None:
        self._runner.receive_replies(0.0)
        if self.waits:
            self._runner.withdraw(self)
        if self.pid and self._code is None:
            kill_group(self.pid)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.waits:
            self._runner.receive_replies(_seconds_until(deadline))
            if _seconds_until(deadline) == 0.0:
                break
        if self._code is None and self._process is not None:
            with contextlib.suppress(psutil.TimeoutExpired):
                code = self._process.wait(_seconds_until(deadline))
                self._code = -signal.SIGKILL if code is None else int(code)
        return self._code


class ForkingRunner(SystemRunner):
    """A Runner that forks commands which begin with the argv `program`, and starts all others as a SystemRunner does.

    A fork server that is killed or hangs is replaced, until MAX_SERVER_EXITS servers are lost. While there is no fork
    server, every command starts as a SystemRunner starts it. Only one thread may use a ForkingRunner.
    """

    def __init__(
        self,
        program: Sequence[str],
        verb: Sequence[str],
        env: Mapping[str, str],
        lost: Callable[[ForkServerExit], None] = lambda loss: None,
    ) -> None:
        """Start the fork server. The caller may start commands at once; they wait until the server has loaded.

        Args:
            program: the argv that all forked commands begin with.
            verb: the words after `program` that start the fork server.
            env: environment of the fork server. Variables that libraries read while they load (OMP_NUM_THREADS) hold
                for all of its forks; the others may differ between forks.
            lost: called with the exit of each fork server that ended by itself, or that was killed because it hung.

        Raises:
            CommandError: the fork server could not start.
        """
        self._program = tuple(program)
        self._verb = tuple(verb)
        self._env = dict(env)
        self._lost = lost
        self._losses = 0
        self._asked: deque[ForkedProcess] = deque()
        """Requests without an answer, the oldest first."""
        self._server: Process | None = None
        self._loaded = False
        self._started: list[Process] = []
        """Processes whose exit code will be asked for."""
        self._adopts = set_child_subreaper()
        if self._adopts:
            self._start_server()

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | int | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Process:
        size = len(self._program)
        if self._server is not None and log is not None and tuple(argv[:size]) == self._program:
            with contextlib.suppress(OSError):  # the server is gone, or the message is too long
                self._started.append(self._ask(argv[size:], os.environ if env is None else env, log, keep_fds))
                return self._started[-1]
        self._started.append(super().start(argv, env, log, keep_fds))
        return self._started[-1]

    def receive_replies(self, timeout_s: float | None) -> None:
        """Process the fork server's replies to requests that have no answer yet. Wait at most `timeout_s` seconds for
        the first reply (None: without limit)."""
        while self._asked and self._has_reply(timeout_s):
            if not self._receive_reply():
                assert self._server is not None, "orders wait for it alone"
                self._server.wait(REPLY_TIMEOUT_S)  # it closes its socket before it has an exit code
                self._replace_server()
                return
            timeout_s = 0.0

    def withdraw(self, process: ForkedProcess) -> None:
        """Withdraw the request to fork `process`, and wait for the fork server's answer; a server that does not answer
        in REPLY_TIMEOUT_S is replaced. If the server has already begun to fork the process, the request stays."""
        process.withdraw_request()
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        # A loading server answers once it has loaded; one that has begun with the request must report what it forked.
        while process in self._asked and (self._loaded or process.waits):
            rest_s = _seconds_until(deadline)
            self.receive_replies(rest_s)
            if process in self._asked and rest_s == 0.0:
                self._replace_server()

    def reap(self) -> None:
        if self._server is not None and self._server.poll() is not None:
            self._replace_server()
        self._started = [process for process in self._started if process.poll() is None]
        if not self._adopts or not _has_ended_child():
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):  # another thread has reaped it
                if child.status() == psutil.STATUS_ZOMBIE and self._is_orphan(child.pid):
                    os.waitpid(child.pid, os.WNOHANG)

    def _is_orphan(self, pid: int) -> bool:
        """Return whether the child with id `pid` is an adopted orphan, whose exit code no code of this process will ask
        for."""
        session = os.getsid(pid)
        if session == os.getsid(0):
            return False  # a command of `run`, in some thread
        if session != pid:
            return True  # processes that are started here lead a session of their own
        known = {process.pid for process in self._started} | {self._server.pid if self._server else 0}
        return not self._asked and pid not in known

    def _has_reply(self, timeout_s: float | None) -> bool:
        """Wait until the fork server replies or ends, and return True; return False after `timeout_s` seconds (None: no
        limit)."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def close(self) -> None:
        """End the fork server and all unanswered requests; processes that it has forked go on."""
        if self._server is not None:
            self._end_server()

    def _start_server(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loaded = False
        with theirs:
            words = [*self._program, *self._verb, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._server = super().start(words, env=self._env, keep_fds=(theirs.fileno(),))

    def _end_server(self) -> int:
        """Kill the fork server, read its last replies, and return its exit code (-n: killed by signal n)."""
        assert self._server is not None, "there is one to end"
        self._server.kill()
        code = self._server.wait(REPLY_TIMEOUT_S)
        self._server = None
        while self._has_reply(REPLY_TIMEOUT_S) and self._receive_reply():
            pass
        self._channel.close()
        while self._asked:
            self._asked.popleft().end_request(0)
        return -signal.SIGKILL if code is None else code

    def _replace_server(self) -> None:
        """End a fork server that is gone or hangs, and report its exit to `lost`. Start another one, unless the server
        exited by itself with a code, which means an error of its own, or MAX_SERVER_EXITS servers are lost."""
        code, loading = self._end_server(), not self._loaded
        self._losses += 1
        replaced = code < 0 and self._losses < MAX_SERVER_EXITS
        if replaced:
            self._start_server()
        self._lost(ForkServerExit(code, loading, replaced))

    def _ask(
        self, words: Sequence[str], env: Mapping[str, str], log: Path | int, keep_fds: Sequence[int]
    ) -> ForkedProcess:
        message = {
            "argv": list(words),
            "set": {key: value for key, value in env.items() if self._env.get(key) != value},
            "unset": [key for key in self._env if key not in env],
            "fds": list(keep_fds),
        }
        token, give = os.pipe()
        try:
            os.write(give, b"1")
            with log.open("ab") if isinstance(log, Path) else contextlib.nullcontext(log) as output:
                descriptor = output if isinstance(output, int) else output.fileno()
                socket.send_fds(self._channel, [json.dumps(message).encode()], [token, descriptor, *keep_fds])
        except OSError:
            os.close(token)
            raise
        finally:
            os.close(give)
        self._asked.append(ForkedProcess(self, token))
        return self._asked[-1]

    def _receive_reply(self) -> bool:
        """Read one reply of the fork server: that it has loaded, or the id of the process that it forked for the oldest
        request. Return False when the fork server has ended."""
        try:
            word = self._channel.recv(MESSAGE_BYTES)
        except OSError:
            word = b""
        if not word:
            return False
        pid = json.loads(word).get("pid")
        self._loaded = True
        if pid is not None:
            self._asked.popleft().end_request(int(pid))
        return True


def _has_ended_child() -> bool:
    """Return whether any child process has ended. Its exit code stays available to the code that waits for this
    child."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # there is no child at all


def _seconds_until(deadline: float | None) -> float | None:
    """Return the seconds until a deadline on time.monotonic, at least 0; None without a deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
