"""Checks whether data of a known size fits on a file system, before any of it is written.

A checkpoint that does not fit would take the space of all other writers, even of the run's metrics, and would then be
deleted. statvfs does not show quotas, and the commands that do (quota, lfs quota, mmlsquota) differ from site to site.
So the space is reserved for an instant with fallocate(2), which respects every kind of quota. A refusal by a quota
(EDQUOT) is handled like a full disk (ENOSPC); no test covers a quota, because the test machines have no file system
with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path

from hpctrain.base.atomic import DISK_FULL_ERRNOS
from hpctrain.base.errors import StorageError
from hpctrain.base.units import format_bytes

_MOST_FILES = 16


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of `path`, or of its nearest existing parent, for this user. Quotas are
    not considered.

    Raises:
        OSError: the file system does not answer.
    """
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def check_disk_space(folder: Path, size_bytes: int, what: str, files: int = 1) -> None:
    """Raise an error if `size_bytes` of data do not fit into `folder`. Reported free space ignores quotas, so the space
    is also allocated for an instant (fallocate), where the file system can do that without writing.

    Args:
        folder: an existing folder that this user may write to.
        what: name of the data for the error, such as 'a checkpoint of step 8'.
        files: number of files that share the size; on a striped file system each file may lie on another disk.

    Raises:
        StorageError: the space does not suffice, or the folder cannot be written.
    """
    try:
        free = free_bytes(folder)
        if free < size_bytes:
            raise StorageError(f"{folder}: no room for {what}: {format_bytes(free)} are free, {_needed(size_bytes)}")
        _try_allocate(folder, size_bytes, min(files, _MOST_FILES))
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            limit = "the quota leaves less" if error.errno == errno.EDQUOT else "less is free"
            raise StorageError(f"{folder}: no room for {what}: {limit}, {_needed(size_bytes)}") from error
        raise StorageError(f"{folder}: cannot write {what}: {error.strerror or error}") from error


def _needed(size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} are needed; free some space"


def _try_allocate(folder: Path, size_bytes: int, files: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(files):
            path = folder / f".room-{secrets.token_hex(6)}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            stack.callback(os.close, descriptor)
            # A file without a name is freed when the process ends, however it ends.
            path.unlink()
            code = _fallocate(descriptor, size_bytes // files)
            if code in DISK_FULL_ERRNOS:
                raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, size_bytes: int) -> int:
    """Return the error number of fallocate(2); 0 if it has allocated the space.

    os.posix_fallocate is no substitute: on a file system without support, glibc writes a byte into every block.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return ctypes.get_errno() if call(descriptor, 0, 0, max(1, size_bytes)) else 0
