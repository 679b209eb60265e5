"""Regular files of other people's making: opened without following a link, without blocking, and read up to a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError

_CHUNK_BYTES = 1 << 20


def open_regular(path: Path | str, *, dir_fd: int | None = None) -> int:
    """A descriptor for reading a regular file; what is no regular file is closed again before a byte of it is read.

    The check is made on what was opened, so nothing can be put in its place in between. A FIFO or a device with nobody
    at the other end blocks nobody. Links in the folders above the file are followed, the file itself may be none.

    Args:
        path: the file; relative to `dir_fd` where one is given.
        dir_fd: descriptor of the folder that a relative path starts from.

    Raises:
        FileError: it is a symbolic link, a folder, a FIFO, a socket or a device.
        OSError: it is not there, or may not be read.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd
        )
    except OSError:
        kind = _kind_at(path, dir_fd)
        if kind is None:
            raise
        raise _not_regular(path, kind) from None
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind is not None:
        os.close(descriptor)
        raise _not_regular(path, kind)
    return descriptor


def read_regular(path: Path | str, limit_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """All bytes of a regular file of at most `limit_bytes`; memory and work are bounded by the limit, not by the file.

    Raises:
        FileError: it is larger, or no regular file.
        OSError: it is not there, or cannot be read.
    """
    descriptor = open_regular(path, dir_fd=dir_fd)
    try:
        return read_descriptor(descriptor, path, limit_bytes)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, path: Path | str, limit_bytes: int) -> bytes:
    """All bytes of an open file from where it stands, at most `limit_bytes`.

    Raises:
        FileError: there are more; `path` names the file in the message.
    """
    size = os.fstat(descriptor).st_size
    data = bytearray()
    # The size may be a lie (/proc) or change meanwhile; what is counted is what was read.
    while size <= limit_bytes and len(data) <= limit_bytes:
        chunk = os.read(descriptor, min(_CHUNK_BYTES, limit_bytes + 1 - len(data)))
        if not chunk:
            return bytes(data)
        data += chunk
    shown = max(size, len(data))
    raise FileError(
        path, [FieldError("", f"has {shown} bytes or more, expected at most {limit_bytes}; look at what it is")]
    )


def kind_of(mode: int) -> str | None:
    """What a file is by its mode, in words; None for a regular file."""
    kinds = {
        stat.S_IFREG: None, stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def _kind_at(path: Path | str, dir_fd: int | None) -> str | None:
    try:
        return kind_of(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return None


def _not_regular(path: Path | str, kind: str) -> FileError:
    return FileError(path, [FieldError("", f"is {kind}, expected a regular file; put the file itself there")])
