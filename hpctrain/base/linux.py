"""What a process asks of the kernel: prctl(2). Elsewhere than on Linux nothing happens, and False says so."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAME_BYTES = 15
"""Longest name of a process, as ps and pgrep know it."""


def name_process(name: str) -> bool:
    """Give this process a name of at most NAME_BYTES bytes; its command line stays."""
    return _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES]))


def die_with(parent: int) -> bool:
    """SIGKILL to this process when its parent ends, or at once where `parent` is not its parent any more."""
    done = _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def adopt_orphans(wanted: bool = True) -> bool:
    """Whether descendants whose parent ends become children of this process, which can then wait for them."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def _prctl(option: int, value: ctypes.c_char_p | ctypes.c_ulong) -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return False
    zero = ctypes.c_ulong(0)
    return bool(call(option, value, zero, zero, zero) == 0)
