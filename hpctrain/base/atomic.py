"""Files that are either whole or absent: temporary file beside the target, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.base.errors import StorageError

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a full quota."""


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a whole file at once; after return it is on disk. On any error the old file is unchanged.

    Raises:
        StorageError: disk full, missing permission or missing folder.
    """
    write_bytes(path, text.encode(), mode)


def rewrite_text(path: Path, text: str) -> None:
    """Replace the text of a system file as `write_text` does. Owner, group and mode stay, whatever the umask is, and a
    link stays a link.

    Raises:
        StorageError: the file does not exist, the disk is full, or a permission is missing.
    """
    with storage_errors(path):
        target = path.resolve()
        before = target.stat()
    write_bytes(target, text.encode(), stat.S_IMODE(before.st_mode), before)


def write_bytes(path: Path, data: bytes, mode: int = 0o644, like: os.stat_result | None = None) -> None:
    """Write a whole file as `write_text` does, from bytes.

    Args:
        like: status of a file whose owner and mode the new file gets, whatever the umask is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.tmp")
    with storage_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                if like is not None:
                    os.fchown(descriptor, like.st_uid, like.st_gid)
                    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))  # after fchown, which clears bits
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_text` does: indented, with keys in the order of `value`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def append_line(path: Path, text: str) -> None:
    """Append one line with a single write, so that a reader never sees half of it from a live writer.

    Raises:
        StorageError: disk full or missing permission; the next call ends a line that was cut short.
    """
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            data = text.encode() + b"\n"
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # An earlier writer was killed, or met a full disk, in the middle of a line: begin a new one.
                data = b"\n" + data
            written = os.write(descriptor, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError on `path` into a StorageError with one line for the person at the terminal."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror or error}; {_remedy(error)}") from error


def _remedy(error: OSError) -> str:
    if error.errno in DISK_FULL_ERRNOS:
        return "free some space or choose another folder; nothing was changed"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    if error.errno == errno.ENOENT:
        return "make the folder first"
    return "nothing was changed"


def swap(temporary: Path, folder: Path) -> None:
    """Replace `folder` by `temporary`.

    It takes two renames, because one rename cannot replace a folder that is not empty; on an error the old folder is
    restored.
    """
    if not folder.exists():
        temporary.rename(folder)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
