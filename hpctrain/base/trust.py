"""Whether a file can be what this user wrote: nobody else may own it or be able to write to it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """What this process and those that it starts write meanwhile is for its owner alone, wherever it lies."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def distrust(path: Path, private: bool = False) -> str | None:
    """Why the file or folder itself is not to be trusted, as the end of a sentence that begins with it; None: it is.

    Args:
        private: nobody else may be able to read it either.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    status = path.lstat()
    mode = status.st_mode & 0o777
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid != os.getuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {mode:03o})"
    if private and status.st_mode & 0o077:
        return f"can be read by others (mode {mode:03o})"
    return None
