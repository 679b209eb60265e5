"""`python -m hpctrain.worker fork`: the fork server, which loads torch and the training code once, then forks a worker
for each order.

`hpctrain.base.forking` sends the orders over a socket. The server forks twice for each worker and the process in
between exits, so the process that sent the order becomes the worker's parent. No code in this module may start a
thread or use a GPU: neither survives a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.base.forking import MAX_FDS, MESSAGE_BYTES
from hpctrain.base.loading import load
from hpctrain.base.output_streams import timestamp_output
from hpctrain.base.process import WORKER
from hpctrain.base.system.kernel import die_with_parent

LOADED = ("hpctrain.worker.train", "hpctrain.worker.measure.measure")
HIGH_FD = 500
"""Lowest number of the descriptors to which inherited files are moved, until the low numbers that an order wants are
free."""

Verb = Callable[[list[str]], int]
"""A function that runs a command of `hpctrain.worker`: its arguments -> its exit code."""


def main(argv: list[str], run: Verb) -> int:
    """Load torch and the training code, then fork for each order until the other end closes the socket. Return 0 in the
    fork server, and in a forked worker the exit code of `run`.

    Args:
        run: runs the order's arguments in a forked worker and returns the exit code.
    """
    parser = argparse.ArgumentParser(prog="hpctrain.worker fork")
    parser.add_argument("--folder", help="of the run; here so that the command line tells it")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the process that asks")
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    plain = sys.stdout, sys.stderr
    # This comes before torch is loaded, because its loggers keep the stderr of that moment.
    timestamp_output()
    channel = socket.socket(fileno=_moved(options.fd))
    _load()
    with contextlib.suppress(OSError):
        channel.send(json.dumps({"loaded": True}).encode())
    order = _fork_orders(channel)
    if order is None:
        return 0
    stamped = sys.stdout, sys.stderr
    if order["argv"][0] != "train":
        sys.stdout, sys.stderr = plain
    code = run(order["argv"])
    del stamped  # not earlier: closing one stream closes the descriptor of the other
    return code


def _fork_orders(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a worker for each order that arrives on the socket. Return the order in the forked worker; return None in
    the fork server when the other end has closed the socket."""
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MAX_FDS)
        except OSError:
            return None
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        token, *fds = fds
        wanted = os.read(token, 1)  # empty if the order was withdrawn meanwhile
        os.close(token)
        pid = _fork(channel, order, fds) if wanted else 0
        if pid is None:
            return order
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"pid": pid}).encode())


def _load() -> None:
    for module in LOADED:
        load(module)
    # Freeze the loaded objects: otherwise garbage collection in a worker would touch, and so copy, their pages.
    gc.collect()
    gc.freeze()


def _fork(channel: socket.socket, order: dict[str, Any], fds: Sequence[int]) -> int | None:
    """Fork a worker. In the fork server, return the worker's process id, or 0 if the worker ended before it reported
    its id; in the worker, return None.
    """
    ours, theirs = os.pipe()
    between = os.fork()
    if between:
        os.close(theirs)
        os.waitpid(between, 0)
        with open(ours, "rb") as reported:  # noqa: PTH123 - a descriptor
            return int(reported.read() or 0)
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == middle:
        time.sleep(0.001)  # the worker may ask at once for the id of its parent
    channel.close()
    os.close(ours)
    theirs = _moved(theirs)
    _settle(order, fds)
    os.write(theirs, str(os.getpid()).encode())
    os.close(theirs)
    if sys.modules["torch"].cuda._is_in_bad_fork():
        # A library used the GPU while it was loaded, and CUDA does not survive a fork, so start a new process.
        os.execv(WORKER[0], [*WORKER, *order["argv"]])
    return None


def _settle(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Make the log the worker's stdout and stderr, move the inherited descriptors to the numbers that the order's key
    `fds` lists, and change environment variables as the keys `unset` and `set` say.

    Args:
        order: an order to fork a worker, as `hpctrain.base.forking` sends it.
        fds: the worker's log, then the descriptors that the worker inherits.
    """
    log, *inherited = [_moved(fd) for fd in fds]
    for number in (1, 2):
        os.dup2(log, number)
    for fd, number in zip(inherited, order["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.close(log)
    for key in order["unset"]:
        os.environ.pop(key, None)
    os.environ.update(order["set"])


def _moved(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    os.close(fd)
    return high
