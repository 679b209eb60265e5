"""Files that are either whole or absent: temporary file beside the target, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import ctypes
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

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a full quota."""


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Create or replace a whole file at once. After return, the text is on disk.

    Args:
        mode: permission bits of the new file, from which the umask is taken off.

    Raises:
        StorageError: disk full, missing permission or missing folder. The old file is unchanged, except if only its
            folder could not be forced to disk.
    """
    write_bytes(path, text.encode(), mode)


def rewrite_text(path: Path, text: str) -> None:
    """Replace the text of an existing file as `write_text` does. Owner, group and mode stay, whatever the umask is. If
    `path` is a symbolic link, the link stays and the file that it leads to is replaced.

    Raises:
        StorageError: the file does not exist, the disk is full, or a permission is missing, also that to keep owner and
            group.
    """
    with storage_errors(path):
        target = path.resolve()
        before = target.stat()
    write_bytes(target, text.encode(), stat.S_IMODE(before.st_mode), before)


def write_bytes(path: Path, data: bytes, mode: int = 0o644, like: os.stat_result | None = None) -> None:
    """Write a whole file as `write_text` does, from bytes.

    Args:
        mode: permission bits of the new file, from which the umask is taken off.
        like: status of a file whose owner, group and mode the new file gets instead, whatever the umask is.

    Raises:
        StorageError: as of `write_text`; or owner or group of `like` may not be set.
    """
    with storage_errors(path), _temporary_file(path, data, mode, like) as temporary:
        temporary.replace(path)
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value` as indented JSON, with its keys in their order, as `write_text` replaces it.

    Raises:
        StorageError: as of `write_text`.
        ValueError: a number in `value` is not finite.
    """
    write_text(path, _json_text(value))


def create_json(path: Path, value: Any) -> bool:
    """Create a file with `value` as indented JSON, as `create_text` does; return what it returns.

    Raises:
        StorageError: as of `create_text`.
        ValueError: a number in `value` is not finite.
    """
    return create_text(path, _json_text(value))


def create_text(path: Path, text: str) -> bool:
    """Create a whole file at once, unless it exists. Return whether this call created it. After return, the new file is
    on disk.

    Of many processes that call this, one creates the file: link(2) fails with EEXIST on local file systems and on NFS
    alike. O_EXCL does not promise this on old NFS, nor does flock on every parallel file system.

    Raises:
        StorageError: disk full, missing permission or missing folder. The file may exist if only its folder could not
            be forced to disk.
    """
    with storage_errors(path), _temporary_file(path, text.encode()) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        sync(path.parent)
    return True


@contextlib.contextmanager
def _temporary_file(path: Path, data: bytes, mode: int = 0o644, like: os.stat_result | None = None) -> Iterator[Path]:
    """Write a file beside `path`, force it to disk, and give its path to the `with` block, which may rename it. A file
    that is not renamed is removed. The other arguments are those of `write_bytes`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            if like is not None:
                os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode))  # after fchown, which clears bits
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def append_line(path: Path, text: str) -> None:
    """Append `text` and a line end with a single write, so that a reader never sees half a line of a writer that is
    alive.

    Raises:
        StorageError: disk full, missing permission or missing folder, or `path` is a symbolic link. A part of the line
            may be in the file; the next call begins a new line after it.
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
    """Force a file's content, or the names in a folder, to disk (fsync); raise OSError if that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a StorageError of one line, which names `path` and says what to do."""
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


def swap(temporary: Path, folder: Path, *, replace: bool = True) -> None:
    """Rename the folder `temporary` to `folder`, and remove the previous folder of that name, if there is one.

    The two are exchanged at once where the file system can do that. Elsewhere a replacement takes two renames; if the
    second one fails, the previous folder is restored. The previous folder gets the name `.NAME.XXXXXXXX.tmp` or
    `temporary` until it is removed.

    Args:
        replace: whether to replace a folder that is not empty.

    Raises:
        OSError: `folder` is a file, is not empty though `replace` is false, or cannot be renamed; nothing was changed.
    """
    try:
        temporary.rename(folder)  # replaces an empty folder, too
    except OSError as error:
        if not replace or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    old = temporary
    if not exchange_paths(temporary, folder):
        old = temporary.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    shutil.rmtree(old, ignore_errors=True)


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system at once. Return whether the kernel did: some file systems, such as NFS,
    cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return bool(call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
