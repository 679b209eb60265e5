"""A set of sockets to wait on. The wait ends early when one has data to read or has connected."""

from __future__ import annotations

import selectors
from typing import Protocol


class Watchable(Protocol):
    """Anything with a file descriptor, such as a socket or a LineChannel."""

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""


class Watch:
    """A set of files to wait on. Adding a closed file does nothing, and a file may be closed while it is watched."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, file: Watchable, events: int = selectors.EVENT_READ) -> None:
        """Wake `wait` when something happens on this file."""
        if file.fileno() < 0:
            return  # closed already: nothing will happen on it
        stale = self._selector.get_map().get(file.fileno())
        if stale is not None:
            # A file was closed without being removed, and the system gave its number to this one.
            self._selector.unregister(stale.fileobj)
        self._selector.register(file, events)

    def remove(self, file: Watchable) -> None:
        """Stop watching a file; nothing happens if it is not watched."""
        for key in list(self._selector.get_map().values()):
            # By identity: a closed file has no descriptor to find it by.
            if key.fileobj is file:
                self._selector.unregister(file)

    def wait(self, seconds: float) -> None:
        """Return when something happens on a watched file, at the latest after `seconds`."""
        self._selector.select(seconds)

    def close(self) -> None:
        """Stop watching all files; they stay open."""
        self._selector.close()
