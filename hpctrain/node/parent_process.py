"""Checks whether the process that started a node process is still alive. A container runtime's process may lie between
the two."""

from __future__ import annotations

from pathlib import Path


class Parent:
    """The parent process, identified by its id and its start time, because ids are reused."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = _started(pid)

    def is_gone(self) -> bool:
        """Whether the process has ended, before this object was made or since."""
        return self._started is None or _started(self._pid) != self._started


def _started(pid: int) -> str | None:
    """Return the start time of a process, in the kernel's ticks; None if there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name, in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
