"""Whether the process that a node process was started for is still there; between them may be that of an image."""

from __future__ import annotations

from pathlib import Path


class Parent:
    """A process of this machine, known by its id and by when it started: ids are used again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = _started(pid)

    def is_gone(self) -> bool:
        """Whether it has ended, before this object was made or since."""
        return self._started is None or _started(self._pid) != self._started


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None for one that is not there, or only not yet buried."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
