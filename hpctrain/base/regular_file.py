"""Reads regular files that other people may have made: opens them without following a link or blocking, and reads them
up to a limit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError

_CHUNK_BYTES = 1 << 20


def open_regular(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Return a descriptor for reading a regular file; any other file is closed before a byte of it is read.

    The check is made on the open descriptor, so nothing can replace the file in between. Opening a FIFO or a device
    does not block. Links in the folders above the file are followed; the file itself must not be a link.

    Args:
        path: the file; relative to `dir_fd` where one is given.
        dir_fd: descriptor of the folder that a relative path starts from.

    Raises:
        FileError: the file is a symbolic link, a folder, a FIFO, a socket or a device.
        OSError: the file does not exist, or may not be read.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd
        )
    except OSError:
        kind = None
        with contextlib.suppress(OSError):
            kind = kind_of(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        if kind is None:
            raise
        raise _not_regular(path, kind) from None
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind is not None:
        os.close(descriptor)
        raise _not_regular(path, kind)
    return descriptor


def read_regular(path: Path | str, limit_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """Return all bytes of a regular file of at most `limit_bytes`; the limit bounds memory and work.

    Args:
        dir_fd: descriptor of the folder that a relative path starts from.

    Raises:
        FileError: the file is larger, or not regular.
        OSError: the file does not exist, or cannot be read.
    """
    return read_and_close(open_regular(path, dir_fd=dir_fd), path, limit_bytes)


def read_and_close(descriptor: int, path: Path | str, limit_bytes: int) -> bytes:
    """Return all bytes of an open file from its current position on, and close it.

    Args:
        path: the file's path, for the error.
        limit_bytes: most bytes that the file may have.

    Raises:
        FileError: the file has more than `limit_bytes` bytes.
        OSError: the file cannot be read.
    """
    data = bytearray()
    try:
        size = os.fstat(descriptor).st_size
        # The reported size may be wrong (/proc) or change meanwhile, so the bytes read are counted.
        while size <= limit_bytes and len(data) <= limit_bytes:
            chunk = os.read(descriptor, min(_CHUNK_BYTES, limit_bytes + 1 - len(data)))
            if not chunk:
                return bytes(data)
            data += chunk
    finally:
        os.close(descriptor)
    shown = max(size, len(data))
    raise FileError(
        path, [FieldError("", f"has {shown} bytes or more, expected at most {limit_bytes}; look at what it is")]
    )


def sha256_of(descriptor: int, report: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256, as hex, of an open file from its current position. `report` is called with the number of
    bytes of each piece that was read."""
    digest = hashlib.sha256()
    # One buffer serves the whole file: fresh memory for each chunk would cost more than hashing it.
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := os.readv(descriptor, [buffer]):
        digest.update(buffer[:count])
        report(count)
    return digest.hexdigest()


def kind_of(mode: int) -> str | None:
    """Return the kind of a file by its `st_mode`, in words such as 'a folder'; None for a regular file."""
    kinds = {
        stat.S_IFREG: None, stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def _not_regular(path: Path | str, kind: str) -> FileError:
    remedy = "give a file in it" if kind == "a folder" else "put the file itself there"
    return FileError(path, [FieldError("", f"is {kind}, expected a regular file; {remedy}")])
