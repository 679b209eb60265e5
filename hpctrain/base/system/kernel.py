"""What the kernel says in its files (/proc, /sys), and settings of this process in the kernel: prctl(2), which does
nothing outside Linux, and the limit of open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAME_BYTES = 15
"""Most bytes of a process's name; the kernel would cut a longer one."""
MAX_OPEN_FILES = 1 << 20
"""Highest limit of open files that `raise_open_file_limit` sets. Some programs close every descriptor up to the limit
when they start; with a higher limit that takes seconds."""


def kernel_text(file: Path) -> str | None:
    """Return the content of a file of the kernel without white space at both ends; None if the file cannot be read or
    is empty."""
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def kernel_number(file: Path) -> int | None:
    """Return the whole number in a file of the kernel; None if the file cannot be read, is empty, or holds a word such
    as "max"."""
    try:
        return int(kernel_text(file) or "")
    except ValueError:
        return None


def cgroup_folders(controller: str, process: Path, mount: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version of cgroups: 1 or 2) for the folders whose limits hold for a process: first that of its
    cgroup, then the parents.

    Args:
        controller: the limited resource, as cgroup v1 names it: cpu, memory.
        process: the file with the process's cgroups: /proc/self/cgroup.
        mount: where cgroups are mounted: /sys/fs/cgroup.
    """
    for line in (kernel_text(process) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == root:
                break


def set_process_name(name: str) -> bool:
    """Set the name of this process, cut to NAME_BYTES bytes; its command line does not change. Return whether the
    kernel accepted the name."""
    return _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES]))


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends; kill it at once if process `parent` is no longer its
    parent. Return whether the kernel accepted the request."""
    done = _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def set_child_subreaper(wanted: bool = True) -> bool:
    """Make this process the parent of its orphaned descendants, so that it can wait for them. With `wanted` false, undo
    this. Return whether the kernel accepted the setting."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most MAX_OPEN_FILES, for this process and those it starts.

    The usual soft limit of 1024 exists for programs that call select(2). Gloo and torch's store need a descriptor for
    each connection, and end their process when none is free.

    Returns:
        The new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # some kernels allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _prctl(option: int, value: ctypes.c_char_p | ctypes.c_ulong) -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return False
    zero = ctypes.c_ulong(0)
    return bool(call(option, value, zero, zero, zero) == 0)
