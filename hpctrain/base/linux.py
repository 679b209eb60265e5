"""What a process asks of the kernel: prctl(2), elsewhere than on Linux without effect, and its limit of open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAME_BYTES = 15
"""Longest name of a process, as ps and pgrep know it."""
MAX_OPEN_FILES = 1 << 20
"""Some programs close every descriptor up to the limit before they begin; beyond this that takes seconds."""


def set_process_name(name: str) -> bool:
    """Give this process a name of at most NAME_BYTES bytes; its command line stays."""
    return _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES]))


def die_with_parent(parent: int) -> bool:
    """SIGKILL to this process when its parent ends, or at once where `parent` is not its parent any more."""
    done = _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def set_child_subreaper(wanted: bool = True) -> bool:
    """Whether descendants whose parent ends become children of this process, which can then wait for them."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most MAX_OPEN_FILES, for this process and those it starts.

    The usual soft limit of 1024 is there for programs that call select(2). Gloo and torch's store take a descriptor for
    each connection, and end their process when there is none left.

    Returns:
        The soft limit as it is now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a kernel that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _prctl(option: int, value: ctypes.c_char_p | ctypes.c_ulong) -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return False
    zero = ctypes.c_ulong(0)
    return bool(call(option, value, zero, zero, zero) == 0)
