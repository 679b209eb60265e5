"""A set of sockets to wait on: whatever has something to read, or got connected, ends the wait early."""

from __future__ import annotations

import selectors
from typing import Protocol


class Watchable(Protocol):
    """A socket, a channel: anything with a file descriptor."""

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""


class Watch:
    """A set of files to wait on. A file may be closed before it is added or while it is watched, and removed after."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, file: Watchable, events: int = selectors.EVENT_READ) -> None:
        """Wake `wait` when something happens on this file."""
        if file.fileno() < 0:
            return  # closed already: nothing will happen on it
        stale = self._selector.get_map().get(file.fileno())
        if stale is not None:
            # The system gave the number of a file again that was closed without being removed.
            self._selector.unregister(stale.fileobj)
        self._selector.register(file, events)

    def remove(self, file: Watchable) -> None:
        """Undo `add`; a file that is not watched is no mistake."""
        for key in list(self._selector.get_map().values()):
            # By identity: a closed file has no descriptor to find it by.
            if key.fileobj is file:
                self._selector.unregister(file)

    def wait(self, seconds: float) -> None:
        """Return when something happens, at the latest after that long."""
        self._selector.select(seconds)

    def close(self) -> None:
        """Forget all files; they stay open."""
        self._selector.close()
